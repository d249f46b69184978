"""A model under a plan may be called by another pipeline or by a user's loop: each picture is one of its own."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import other_callers_worker as worker

#: By default one that reads the last step's messages; tests/parallel/test_hooks.py tells pictures apart as well.
NAMES = list(worker.STRATEGIES) if covering.FULL else ["DisplacedPatch"]


@functools.cache
def everything() -> dict[str, list[dict[str, Any]]]:
    return launch(worker.everything, 2, NAMES)


@pytest.mark.parametrize("strategy", NAMES)
def test_other_callers_have_generations_of_their_own(strategy: str) -> None:
    names = ("after another", "again", "loop", "loop again", "after an error", "same scheduler", "after all")
    for found in everything()[strategy]:
        assert max(found[name] for name in names) < 1e-10
        # Portions are sent for a step that only a schedule known beforehand tells.
        assert found["from its own plan"] < 1e-10 or strategy == "PartialPatch"
        assert found["kept"] == 0
        assert not found["hooks between"]
        assert not found["hooks left"]


@pytest.mark.parametrize("strategy", NAMES)
def test_a_picture_in_the_middle_of_another_leaves_nothing_in_it(strategy: str) -> None:
    for found in everything()[strategy]:
        # Its later steps are computed like first ones, so it is no farther from one rank's.
        assert found["in a callback"] <= found["without one"] + 1e-10


def test_calls_that_no_scheduler_drives_are_placed_by_their_timesteps() -> None:
    clock, begun, ended = StepClock(), [], []
    clock.driven = True
    clock.on_begin(lambda: begun.append(clock.step))
    clock.on_end(lambda: ended.append(clock.step))
    places = []
    for time in (9.0, 9.0, 5.0, 5.0, 9.0):
        clock.follow(time)
        clock.enter(time)
        places.append((clock.step, clock.branch))
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]
    assert len(begun) == 2
    clock.end()
    assert ended == [0]
    clock.begin([3.0, 1.0])
    assert not clock.is_followed


def test_pictures_of_one_step_do_not_pile_up() -> None:
    clock, branches = StepClock(), set()
    for _ in range(3 * StepClock.MAX_BRANCHES):
        clock.enter(9.0)
        branches.add(clock.branch)
    assert branches == set(range(StepClock.MAX_BRANCHES))
