"""Whatever is raised under a plan, early or late, afterwards the pipeline is as before and makes the same picture."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import refusals_worker as worker

#: Shares of weights at every kind of point, and one strategy of each other kind at one: cuts, columns, a loop, a cache.
USUAL = {
    *(("ShardedWeights", point) for point in ("hook 50 %", "middle layer 1", "exchange 9")),
    *(
        ("TensorParallel", "hook 50 %"),
        ("Ulysses", "exchange 9"),
        ("PatchPipeline", "model 2"),
        ("StepCache", "model 2"),
    ),
}
CELLS = [cell for cell in worker.CELLS if covering.FULL or cell in USUAL]


@functools.cache
def outcomes(plan: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return launch(worker.outcomes, 2, 2, [cell for cell in CELLS if not covering.FULL or cell[0] == plan])


@pytest.mark.parametrize(("plan", "point"), CELLS)
def test_an_error_leaves_everything_as_it_was(plan: str, point: str) -> None:
    for rank in outcomes(plan if covering.FULL else "")[plan, point]:
        # Under guidance or a batch there are few exchanges.
        assert rank["raised"] >= rank["reached"]
        assert rank["reached"] or point == "exchange 9"
        assert rank["under"] <= 1e-9, "the plan makes the next picture"
        assert not rank["changed"]
        assert rank["after"] == 0
