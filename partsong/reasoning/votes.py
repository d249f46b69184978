"""Counting answers: majorities, weighted ones, and when a vote is decided although not all votes are in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from partsong.errors import ArgumentError

__all__ = ["Ballot", "adaptive_confidence", "cannot_be_overtaken", "voting_hint"]


@dataclass(slots=True)
class Ballot:
    """Votes so far. Ties go to the answer whose first vote has the lowest number, whatever order they came in.

    Attributes:
        total: votes there will be at most.
        weights: of each answer, the sum of its votes.
        first: the lowest number of a vote for each answer.
        spoilt: votes that named no answer, such as one that ran out of tokens.
    """

    total: int
    weights: dict[str, float] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    counted: int = 0
    spoilt: int = 0

    def add(self, number: int, answer: str | None, weight: float = 1.0) -> None:
        """Counts vote `number`; None is spoilt.

        Raises:
            ArgumentError: a weight below 0.
        """
        if not weight >= 0 or not math.isfinite(weight):
            raise ArgumentError(f"vote {number} has weight {weight}; weights are 0 or more")
        self.counted += 1
        if answer is None:
            self.spoilt += 1
            return
        self.weights[answer] = self.weights.get(answer, 0.0) + weight
        self.first[answer] = min(number, self.first.get(answer, number))

    @property
    def leader(self) -> str | None:
        """The answer that leads; None without votes."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def _ranked(self) -> list[str]:
        return sorted(self.weights, key=lambda a: (-self.weights[a], self.first[a]))

    def decided(self, missing: frozenset[int] | set[int], most: float = 1.0) -> bool:
        """Whether no votes that are still missing can change the leader: the lossless stop.

        Args:
            missing: their numbers. Votes may be cast for answers nobody has named yet.
            most: largest weight of a vote.
        """
        if not missing:
            return True
        ranked = self._ranked()
        if not ranked:
            return False
        return cannot_be_overtaken(self, ranked[0], ranked[1:], missing, most)

    def shares(self) -> Mapping[str, float]:
        """Each answer's share of the weight."""
        whole = sum(self.weights.values()) or 1.0
        return {answer: weight / whole for answer, weight in self.weights.items()}


def cannot_be_overtaken(
    ballot: Ballot, leader: str, others: list[str], missing: frozenset[int] | set[int], most: float
) -> bool:
    """Whether `leader` wins even if all missing votes, of weight `most`, go to the best placed other answer.

    A tie is won by the answer with the lowest first vote. A missing vote of a lower number may still give another
    answer that, so a tie counts as lost unless the leader's first vote comes before every missing one and before the
    other's.
    """
    room = most * len(missing)
    lead, first = ballot.weights[leader], ballot.first[leader]
    lowest = min(missing)
    for other in others:
        reach = ballot.weights[other] + room
        earliest = min(ballot.first[other], lowest)
        if reach > lead or (reach == lead and earliest < first):
            return False
    # An answer nobody has named: all missing votes, the first of them the lowest.
    return room < lead or (room == lead and first < lowest)


def adaptive_confidence(first: int, second: int) -> float:
    """Probability that the leader is more likely than the runner-up, given their votes, under a flat prior.

    The Beta(first + 1, second + 1) mass above one half, in closed form: sum over i <= first of C(n, i) / 2^n with
    n = first + second + 1.

    Args:
        first: votes of the leader.
        second: votes of the runner-up.

    Source: Adaptive-Consistency, arXiv 2305.11860.

    >>> round(adaptive_confidence(4, 0), 3)
    0.969
    """
    if first < 0 or second < 0:
        raise ArgumentError(f"votes are 0 or more, found {first} and {second}")
    n = first + second + 1
    return sum(math.comb(n, i) for i in range(first + 1)) / 2**n


def voting_hint(ballot: Ballot) -> str | None:
    """Why voting will hardly help here; None where nothing speaks against it."""
    votes = ballot.counted - ballot.spoilt
    if ballot.counted >= 4 and ballot.spoilt > ballot.counted / 2:
        return f"{ballot.spoilt} of {ballot.counted} samples named no answer; give them more tokens before more votes"
    if votes >= 4 and len(ballot.weights) > 0.8 * votes:
        return f"{votes} samples named {len(ballot.weights)} different answers: a majority of so few means little"
    return None
