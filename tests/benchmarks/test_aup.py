"""AUP against areas worked out by hand and against the scores its authors published."""

from __future__ import annotations

import math

import pytest

from benchmarks.text.aup import aup, aup_board, aup_weight
from partsong.errors import ArgumentError

#: The leaderboard's points for LLaDA-8B-Instruct on GSM8K-CoT: each decoder at one token per forward and as published.
GSM8K = {
    "LLaDA": [(1.0, 72.55)],
    "Fast-dLLM": [(1.0, 74.79), (2.77, 74.68)],
    "D2F": [(1.0, 74.98), (2.88, 74.39)],
    "dParallel": [(1.0, 74.0), (5.14, 72.63)],
    "d3LLM": [(1.0, 74.02), (9.11, 73.09)],
}
PUBLISHED = {"LLaDA": 72.55, "Fast-dLLM": 205.8, "D2F": 213.8, "dParallel": 358.1, "d3LLM": 637.7}


def test_published_scores_are_recomputed() -> None:
    board = aup_board(GSM8K)
    assert max(y for points in GSM8K.values() for _, y in points) == 74.98
    assert {name: round(score, 1) for name, score in board.items() if name != "LLaDA"} == {
        name: score for name, score in PUBLISHED.items() if name != "LLaDA"
    }
    assert board["LLaDA"] == pytest.approx(PUBLISHED["LLaDA"])


def test_without_loss_it_is_the_area() -> None:
    assert aup([(1.0, 60.0), (2.0, 60.0), (5.0, 60.0)]) == pytest.approx(5.0 * 60.0)
    # Nothing weighs less at penalty 0: trapezia of 75 and 65 over widths of 1.
    assert aup([(1.0, 80.0), (2.0, 78.0), (3.0, 76.0)], penalty=0.0) == pytest.approx(80.0 + 79.0 + 77.0)


def test_a_loss_is_weighed() -> None:
    weight = math.exp(-3.0 * (1.0 - 76.0 / 80.0))
    by_hand = 1.0 * 80.0 + (4.0 - 1.0) * (80.0 + 76.0 * weight) / 2
    assert aup([(1.0, 80.0), (4.0, 76.0)]) == pytest.approx(by_hand)
    # Against a better decoder both ends of the trapezium weigh less, the first rectangle does not.
    low, high = math.exp(-3.0 * 0.24), math.exp(-3.0 * 0.20)
    assert aup([(4.0, 76.0), (1.0, 80.0)], best=100.0) == pytest.approx(80.0 + 1.5 * (80.0 * high + 76.0 * low))


def test_points_below_the_cut_do_not_count() -> None:
    kept = [(1.0, 70.0), (2.0, 69.0), (6.0, 65.0)]
    assert aup([*kept, (9.0, 64.99)]) == aup(kept)
    assert aup([(1.0, 70.0), (3.0, 10.0), (6.0, 69.0)]) == aup([(1.0, 70.0), (6.0, 69.0)])
    assert aup([(1.0, 70.0), (3.0, 10.0)], cut=100.0) > aup([(1.0, 70.0), (3.0, 10.0)])


def test_weight_has_its_ends() -> None:
    assert aup_weight(90.0, 80.0) == 1.0 and aup_weight(0.0, 80.0) == pytest.approx(math.exp(-3.0))
    assert aup([(1.0, 0.0), (2.0, 0.0)]) == 0.0


@pytest.mark.parametrize(
    ("points", "options", "named"),
    [
        ([], {}, "found none"),
        ([(0.0, 50.0)], {}, "above 0"),
        ([(1.0, 101.0)], {}, "percent"),
        ([(1.0, math.nan)], {}, "percent"),
        ([(1.0, 50.0)], {"best": 0.0}, "best=0.0"),
        ([(1.0, 50.0)], {"penalty": -1.0}, "penalty=-1.0"),
        ([(1.0, 50.0)], {"cut": math.nan}, "cut=nan"),
    ],
)
def test_refusals(points: list[tuple[float, float]], options: dict[str, float], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        aup(points, **options)


def test_an_empty_board_is_refused() -> None:
    with pytest.raises(ArgumentError, match="at least one decoder"):
        aup_board({})
