"""torch.compile of a model's blocks and the exact strategies do not disturb each other, in either order."""

from __future__ import annotations

from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import compile_worker

#: Generating C++ takes most of the time and adds nothing that strategies could disturb. Code compiled before a plan has
#: guards to be broken; code compiled under one is new.
NAMES = list(compile_worker.CASES)[: None if covering.FULL else 1]


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict[str, Any]]]:
    return launch(compile_worker.run, 2, NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_blocks_give_the_serial_output(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    assert len(results[name]) == 2
    for row in results[name]:
        assert row["compiled"], "nothing was compiled"
        assert row["inside"] <= 1e-5
        assert row["after"] <= 1e-5, "after undo()"
