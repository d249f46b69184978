"""Intervals against their definitions: coverage by adding up the binomial, the bootstrap against enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from partsong.errors import ArgumentError
from partsong.evals.reasoning.intervals import Resampler, clopper_pearson, wilson


def chance(right: int, total: int, share: float) -> float:
    return math.comb(total, right) * share**right * (1 - share) ** (total - right)


@pytest.mark.parametrize("total", [1, 7, 24, 100])
def test_coverage(total: int) -> None:
    """The exact interval covers at least its level for every share, Wilson's about its level on average."""
    exact, score = ([method(k, total) for k in range(total + 1)] for method in (clopper_pearson, wilson))
    shares = np.linspace(0.001, 0.999, 173)

    def coverage(ends: list[tuple[float, float]]) -> list[float]:
        return [
            sum(chance(k, total, p) for k, (low, high) in enumerate(ends) if low <= p <= high)
            for p in map(float, shares)
        ]

    assert min(coverage(exact)) >= 0.95 - 1e-9
    assert abs(float(np.mean(coverage(score))) - 0.95) < (0.03 if total < 24 else 0.01)
    assert sum(high - low for low, high in score) < sum(high - low for low, high in exact)
    for k in range(total + 1):
        assert exact[k][0] <= k / total <= exact[k][1] and 0 <= score[k][0] <= k / total <= score[k][1] <= 1


def test_the_exact_ends_are_where_the_tails_are() -> None:
    low, high = clopper_pearson(3, 20, 0.9)
    assert sum(chance(k, 20, low) for k in range(3, 21)) == pytest.approx(0.05, abs=1e-9)
    assert sum(chance(k, 20, high) for k in range(4)) == pytest.approx(0.05, abs=1e-9)
    assert clopper_pearson(0, 10)[0] == 0.0 and clopper_pearson(10, 10)[1] == 1.0 == wilson(10, 10)[1]
    assert clopper_pearson(500, 100_000)[1] < 0.006


def test_the_bootstrap_is_that_of_all_resamples() -> None:
    """Four problems can be drawn in 256 ways; ten thousand draws come close to all of them together."""
    one, other = [1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]
    every = [float(np.mean([one[i] - other[i] for i in drawn])) for drawn in itertools.product(range(4), repeat=4)]
    found = Resampler({"one": one, "other": other}, resamples=40_000, seed=1)
    differences = found.means[0] - found.means[1]
    for value in set(every):
        assert np.mean(np.isclose(differences, value)) == pytest.approx(every.count(value) / 256, abs=0.01)
    made = found.difference("one", "other")
    assert (made.mean, made.low, made.high) == (0.5, 0.0, 1.0)
    assert made.p == pytest.approx(2 * every.count(0.0) / 256, abs=0.01) and made.low <= 0


def test_pairs_see_what_separate_intervals_do_not() -> None:
    """One strategy is right wherever the other is, and now and then more: surely better, though the ranges overlap."""
    base = [float(k % 2) for k in range(400)]
    more = [1.0 if k % 20 == 0 else value for k, value in enumerate(base)]
    found = Resampler({"base": base, "more": more}, seed=3)
    assert found.interval("more")[0] < found.interval("base")[1]
    assert found.difference("more", "base").low > 0 and found.difference("more", "base").p < 0.001
    assert found.difference("base", "more").mean == -found.difference("more", "base").mean
    itself = Resampler({"base": base, "again": base}).difference("again", "base")
    assert itself.low <= 0 <= itself.high and itself.p == 1.0


def test_draws_follow_the_seed_and_hold_for_all() -> None:
    scores = {"a": [1.0, 0.0, 1.0], "b": [0.0, 1.0, 1.0]}
    first, again, other = (Resampler(scores, resamples=700, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.means, again.means) and not np.array_equal(first.means, other.means)
    alone = Resampler({"b": scores["b"]}, resamples=700, seed=1)
    assert np.array_equal(alone.means[0], first.means[1])


@pytest.mark.parametrize("numbers", [(3, 2, 0.95), (-1, 2, 0.95), (0, 0, 0.95), (1, 2, 1.0), (1, 2, 0.0)])
def test_refused(numbers: tuple[int, int, float]) -> None:
    for method in (wilson, clopper_pearson):
        with pytest.raises(ArgumentError):
            method(*numbers)


def test_unpaired_scores_are_refused() -> None:
    for scores in ({}, {"a": []}, {"a": [1.0], "b": [1.0, 0.0]}):
        with pytest.raises(ArgumentError, match="same problems"):
            Resampler(scores)
    with pytest.raises(ArgumentError, match="resamples=0"):
        Resampler({"a": [1.0]}, resamples=0)
