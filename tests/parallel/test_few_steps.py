"""The trained few-step model draws the serial pictures under every strategy that is exact for it."""

from __future__ import annotations

from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import few_steps_worker as worker


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return launch(worker.run, 2, MIXES)


#: By default one strategy for each thing that is cut.
USUAL = ("data-parallel", "tensor-parallel", "parallel-vae ring")
MIXES = worker.MIXES if covering.FULL else USUAL


@pytest.mark.parametrize("mix", MIXES)
def test_every_rank_returns_the_serial_pictures(results: dict[str, Any], mix: str) -> None:
    assert len(results[mix]) == 2
    assert max(results[mix]) <= 1e-10
