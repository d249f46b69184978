"""The lossless stop never changes the winner, and saves what it should."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from partsong.reasoning.answers.votes import Ballot, adaptive_confidence, voting_hint


def winner(votes: list[str | None]) -> str | None:
    """The most frequent answer, the one named first among equals: by counting."""
    named = [vote for vote in votes if vote is not None]
    return max(dict.fromkeys(named), key=named.count, default=None)


@pytest.mark.full
def test_a_hundred_thousand_votes_stop_early_and_alike() -> None:
    draw, seen, total = random.Random(1), 0, 0
    for _ in range(100_000):
        count = draw.choice((1, 2, 3, 5, 8, 13))
        odds = [draw.random() ** 2 for _ in range(draw.randint(1, 4))]
        votes = draw.choices([*"abcd"[: len(odds)], None], [*odds, 0.1], k=count)
        order = draw.sample(range(count), count)
        ballot, missing = Ballot(count), set(range(count))
        for number in order:
            ballot.add(number, votes[number])
            missing.discard(number)
            if ballot.decided(missing):
                break
        assert ballot.leader == winner(votes)
        seen, total = seen + count - len(missing), total + count
    assert seen < 0.9 * total


def test_what_it_saves_of_sixty_four_samples() -> None:
    """One after another, the tokens not drawn; all at once, the time until the rest is cancelled.

    The most frequent answer has a share of 0.3 to 1, as questions go; the rest falls on five wrong ones.
    Lengths are log-normal with a spread of 0.5.
    """
    draw, drawn, whole, path, longest = random.Random(4), 0.0, 0.0, 0.0, 0.0
    for _ in range(1500):
        share, lengths = draw.uniform(0.3, 1.0), [draw.lognormvariate(7.0, 0.5) for _ in range(64)]
        votes: list[str | None] = ["a" if draw.random() < share else draw.choice("bcdef") for _ in range(64)]
        for order in (range(64), sorted(range(64), key=lengths.__getitem__)):
            ballot, missing = Ballot(64), set(range(64))
            for number in order:
                ballot.add(number, votes[number])
                missing.discard(number)
                if ballot.decided(missing):
                    break
            assert ballot.leader == winner(votes)
            if order == range(64):
                drawn, whole = drawn + sum(lengths[: number + 1]), whole + sum(lengths)
            else:
                path, longest = path + lengths[number], longest + max(lengths)
    assert drawn < 0.7 * whole
    assert path < 0.5 * longest


def test_it_stops_as_soon_as_it_can() -> None:
    """By brute force: while it goes on, some missing votes would change the winner."""
    draw = random.Random(2)
    for _ in range(300):
        count = draw.randint(2, 6)
        ballot, missing = Ballot(count), set(range(count))
        for number in draw.sample(range(count), draw.randint(1, count - 1)):
            ballot.add(number, draw.choice(["a", "b", None]))
            missing.discard(number)
        if ballot.leader is None:
            assert not ballot.decided(missing)
            continue
        changed = False
        for other in ("a", "b", "new"):
            rest = Ballot(count, dict(ballot.weights), dict(ballot.first))
            for number in missing:
                rest.add(number, other)
            changed = changed or rest.leader != ballot.leader
        assert ballot.decided(missing) == (not changed)


def test_weights_count() -> None:
    ballot = Ballot(4)
    ballot.add(0, "a", 0.2)
    ballot.add(1, "b", 0.9)
    assert ballot.leader == "b"
    assert not ballot.decided({2, 3}, most=1.0)
    assert ballot.decided({2, 3}, most=0.3)
    assert ballot.shares()["b"] == pytest.approx(0.9 / 1.1)


def test_adaptive_confidence_is_the_mass_of_the_beta() -> None:
    """Against the integral of the density, as a polynomial in exact arithmetic."""
    for first in range(7):
        for second in range(first + 1):
            total = Fraction(0)
            for k in range(second + 1):  # integral of x^a (1-x)^b from 1/2 to 1, with (1-x)^b expanded
                power = first + k + 1
                total += (-1) ** k * math.comb(second, k) * (1 - Fraction(1, 2) ** power) / power
            scale = math.factorial(first + second + 1) // (math.factorial(first) * math.factorial(second))
            assert adaptive_confidence(first, second) == pytest.approx(float(total * scale), rel=1e-12)


def test_hints() -> None:
    spread, spoilt, fine = Ballot(6), Ballot(6), Ballot(6)
    for number in range(6):
        spread.add(number, str(number))
        spoilt.add(number, None if number else "a")
        fine.add(number, "a" if number % 3 else "b")
    assert "6 different answers" in str(voting_hint(spread))
    assert "5 of 6 samples named no answer" in str(voting_hint(spoilt))
    assert voting_hint(fine) is None
