"""The stop that may err: how often it does, exactly for small votes and by simulation for large ones."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import pytest

from partsong.reasoning import Run, ScriptedEngine, final_number, self_consistency
from partsong.reasoning.answers.votes import RiskBound, evidence
from partsong.reasoning.calls.virtual_time import run_virtual
from tests.reasoning.scripts import guesses


def test_evidence_is_the_mean_wealth_of_all_stakes() -> None:
    """Against the integral of (1+s)^won (1-s)^lost over s from 0 to 1, expanded in exact arithmetic."""
    for won, lost in itertools.product(range(8), range(8)):
        total = Fraction(0)
        for i, j in itertools.product(range(won + 1), range(lost + 1)):
            total += Fraction(math.comb(won, i) * math.comb(lost, j) * (-1) ** j, i + j + 1)
        assert evidence(won, lost) == pytest.approx(float(total), rel=1e-12)


def orders_of(counts: tuple[int, ...]) -> Iterator[list[str]]:
    """All orders of votes with these counts, for a, b and c."""
    num = sum(counts)
    for second in itertools.combinations(range(num), counts[1]):
        left = [i for i in range(num) if i not in second]
        for third in itertools.combinations(left, counts[2] if len(counts) > 2 else 0):
            yield ["b" if i in second else "c" if i in third else "a" for i in range(num)]


def errors(counts: tuple[int, ...], delta: float) -> tuple[Fraction, Fraction]:
    """Chances, over all orders of a vote with these counts, of stopping early, and of that with another winner."""
    orders = stops = wrong = 0
    for order in orders_of(counts):
        bound, orders = RiskBound(delta), orders + 1
        winner = max(dict.fromkeys(order), key=order.count)
        for vote in order[:-1]:
            if (stopped := bound.add(vote)) is not None:
                stops, wrong = stops + 1, wrong + (stopped != winner)
                break
    return Fraction(stops, orders), Fraction(wrong, orders)


@pytest.mark.parametrize("delta", [0.5, *(pytest.param(delta, marks=pytest.mark.full) for delta in (0.3, 0.9))])
def test_no_small_vote_errs_more_often_than_it_may(delta: float) -> None:
    """All orders of all votes of two answers up to 13, and of three up to 9; risks so large that it errs at all."""
    votes: list[tuple[int, ...]] = [(a, n - a) for n in (8, 11, 13) for a in range(n // 2, n)]
    votes += [(3, 3, 3), (4, 3, 2), (5, 3, 1)]
    results = [errors(counts, delta) for counts in votes]
    assert all(wrong <= delta for _, wrong in results)
    assert max(stops for stops, _ in results) > 0.5
    assert max(wrong for _, wrong in results) > 0  # so that the bound is tested at all


@cache
def outcomes(odds: tuple[float, ...], num: int, delta: float, trials: int) -> tuple[float, float]:
    """Share of votes that end with another winner than in full, and of samples that were not needed."""
    draw, flips, saved = random.Random(3), 0, 0
    names = [chr(97 + i) for i in range(len(odds))]
    for _ in range(trials):
        votes: list[str] = draw.choices(names, odds, k=num)
        bound = RiskBound(delta)
        for place, vote in enumerate(votes):
            if (stopped := bound.add(vote)) is not None:
                flips += stopped != max(dict.fromkeys(votes), key=votes.count)
                saved += num - 1 - place
                break
    return flips / trials, saved / trials / num


@pytest.mark.parametrize(
    ("odds", "delta"),
    [  # by default risks take turns with odds
        pytest.param(odds, delta, marks=() if (row + column) % 2 == 0 else pytest.mark.full)
        for row, odds in enumerate([(0.5, 0.5), (0.4, 0.35, 0.25), (0.3, 0.3, 0.2, 0.2), (0.1,) * 10])
        for column, delta in enumerate([0.05, 0.2])
    ],
)
def test_even_votes_flip_no_more_often_than_the_risk(odds: tuple[float, ...], delta: float) -> None:
    flips, _ = outcomes(odds, 64, delta, 1500)
    assert flips <= delta


def test_it_saves_what_it_is_for() -> None:
    flips, saved = outcomes((0.8, 0.1, 0.1), 64, 0.05, 600)
    assert flips == 0.0 and saved > 0.6


def test_a_vote_within_a_risk() -> None:
    answers = {}
    for concurrency in (1, 64):
        run = Run(ScriptedEngine(guesses(0.9), seconds_per_token=0.01), seed=2, concurrency=concurrency)
        answer, _ = run_virtual(self_consistency(run, "q", extract=final_number, num=64, risk=0.05))
        answers[concurrency] = (answer.answer, answer.stopped, answer.details["votes"], answer.text)
    assert answers[1] == answers[64]
    assert answers[1][:2] == ("7", "confident") and 8 <= answers[1][2] < 30
