"""Words and pictures that are given stand before the one that is drawn, and only its tokens are cut."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests.parallel import given_first_worker as worker

ON = {2: ["Ulysses", "Ring", "DisplacedPatch"], 3: ["Ulysses", "Ring", "TokenRing"], 4: ["Usp"]}
KINDS = ("keys kept", "all anew", "one time")


@functools.cache
def launched(nproc: int) -> dict[Any, Any]:
    return launch(worker.compared, nproc, nproc, ON[nproc])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("nproc", "name"),
    [
        pytest.param(nproc, name, marks=[] if nproc == 2 else pytest.mark.full)
        for nproc, names in ON.items()
        for name in names
    ],
)
def test_equals_one_process(nproc: int, name: str, kind: str) -> None:
    for row in launched(nproc)[name, kind]:
        assert row["error"] < 1e-10
        assert row["sent"] == row["predicted"] > 0


def test_refusals() -> None:
    found = launch(worker.refusals, 2)
    for name in worker.REFUSED:
        assert all("QwenImage21Transformer2DModel" in text for text in found[name]), found[name]
    assert all("QwenImage21FlexAttnProcessor" in text for text in found["flex"]), found["flex"]
