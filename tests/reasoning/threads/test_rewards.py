"""Rewards and advantages against numbers worked out by hand and by the statistics module."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong_zoo.training.rewards import accelerated_reward, acceleration, alternating_reward, group_advantages


def test_eight_of_ten_steps_look_at_answers_alone() -> None:
    rewards = [[alternating_reward(*case, step) for case in ((True, True), (True, False))] for step in range(20)]
    assert rewards == 2 * ([[1.0, 1.0]] * 8 + [[1.2, 1.0]] * 2)
    assert {alternating_reward(False, parallel, step) for parallel in (True, False) for step in range(10)} == {-1.0}


def test_the_period_is_a_knob() -> None:
    assert [alternating_reward(True, True, s, period=3, parallel_steps=1, bonus=0.5) for s in range(4)] == [
        1,
        1,
        1.5,
        1,
    ]
    assert (
        alternating_reward(True, True, 0, parallel_steps=0) == alternating_reward(True, True, 9, parallel_steps=0) == 1
    )
    assert alternating_reward(True, True, 0, parallel_steps=10) == 1.2


def test_both_published_forms_of_acceleration() -> None:
    assert acceleration(300, 300) == acceleration(300, 300, "ratio") == 0
    assert acceleration(300, 240) == pytest.approx(0.2)
    assert acceleration(300, 240, "ratio") == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("critical", "options", "reward"),
    [
        (100, {}, 1.0),
        (90, {}, 1.05),
        (80, {}, 1.1),
        (20, {}, 1.1),
        (80, {"form": "ratio"}, 1.1),
        (90, {"form": "ratio", "most": 1.0}, 1 + 0.5 / 9),
        (50, {"factor": 2.0, "most": 0.3}, 1.6),
        (50, {"factor": 0.0}, 1.0),
    ],
)
def test_right_answers_are_accelerated_up_to_a_limit(critical: int, options: dict[str, Any], reward: float) -> None:
    assert accelerated_reward(True, 100, critical, **options) == pytest.approx(reward)
    assert accelerated_reward(False, 100, critical, **options) == 0.0


def test_advantages_are_differences_to_the_mean() -> None:
    rewards = [1.1, 1.0, 0.0, 1.05]
    plain = group_advantages(rewards)
    assert plain == pytest.approx([r - statistics.mean(rewards) for r in rewards])
    assert sum(plain) == pytest.approx(0, abs=1e-12)
    scaled = group_advantages(rewards, scale="deviation", epsilon=0.0)
    assert scaled == pytest.approx([one / statistics.stdev(rewards) for one in plain])


def test_only_the_deviation_makes_small_differences_of_speed_as_large_as_right_and_wrong() -> None:
    """Why ThreadWeaver leaves the deviation out: a group of right answers that differ by 0.01 in speed."""
    right, mixed = [1.10, 1.09, 1.10, 1.09], [1.0, 0.0, 1.0, 0.0]
    assert max(group_advantages(right)) == pytest.approx(0.005)
    assert max(group_advantages(mixed)) == pytest.approx(0.5)
    ends = [max(group_advantages(group, scale="deviation")) for group in (right, mixed)]
    assert ends[0] == pytest.approx(ends[1], rel=0.02)


def test_a_group_without_differences_teaches_nothing() -> None:
    assert group_advantages([1.0] * 4) == group_advantages([1.0] * 4, scale="deviation") == [0.0] * 4


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: alternating_reward(True, True, -1), "step=-1"),
        (lambda: alternating_reward(True, True, 0, period=4, parallel_steps=5), "period=4"),
        (lambda: acceleration(10, 11), "critical=11 of total=10"),
        (lambda: acceleration(10, 0), "critical=0"),
        (lambda: acceleration(10, 5, "speed"), "form='speed'"),  # type: ignore[arg-type]
        (lambda: accelerated_reward(True, 10, 5, factor=-1.0), "factor=-1.0"),
        (lambda: accelerated_reward(False, 10, 11), "critical=11"),
        (lambda: group_advantages([1.0]), "found 1"),
        (lambda: group_advantages([1.0, float("nan")]), "finite"),
        (lambda: group_advantages([1.0, 2.0], scale="variance"), "scale='variance'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(call: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        call()
