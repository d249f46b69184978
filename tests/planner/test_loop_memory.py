"""Memory that the planner predicts for loops of their own, against bytes that were alive on the fullest rank."""

from __future__ import annotations

import functools

import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.planner import loop_memory_worker as worker

FEW = ["patch-pipeline", "time-parallel:window=2"]
EVERY = [*FEW, "patch-pipeline:num_patches=4", "time-parallel:window=4", "drafted-steps", "drafted-steps:depth=4"]
MIXES = EVERY if covering.FULL else FEW


@functools.cache
def counted() -> dict[str, list[tuple[int, int]]]:
    return launch(worker.memory, 2, 2, MIXES)


@pytest.mark.parametrize("mix", MIXES)
def test_memory_of_loops_is_predicted(mix: str) -> None:
    rows = counted()[mix]
    (predicted,) = {told for _, told in rows}
    assert predicted == pytest.approx(max(real for real, _ in rows), rel=0.1)
