"""Loops of parts: the calls and the bytes that the planner takes for granted are those of real ranks."""

from __future__ import annotations

import pytest

from partsong.parallel.ranks.launch import launch
from tests.planner.part_loops_worker import LOOPS, counted


@pytest.mark.parametrize(
    ("name", "nproc"),
    [
        pytest.param(name, nproc, marks=[] if (name, nproc) in (("dual", 2), ("cascade of 4", 2)) else pytest.mark.full)
        for name in LOOPS
        for nproc in (2, 3)
    ],
)
def test_calls_and_bytes_are_those_of_real_ranks(name: str, nproc: int) -> None:
    result = launch(counted, nproc, name, nproc)
    calls, predicted = result["calls"]
    # A rank that has no block in a slot of a cascade waits for those that have one.
    assert 0.9 * calls <= predicted <= 1.25 * calls
    # What ranks compare of their arguments comes to what is predicted.
    sent, predicted = result["bytes"]
    assert predicted == pytest.approx(sent, rel=0.15)
