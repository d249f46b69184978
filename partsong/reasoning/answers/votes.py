"""Counts answers: plain and weighted majorities, and whether a vote is decided before all votes are in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from partsong.errors import ArgumentError

__all__ = ["Ballot", "RiskBound", "adaptive_confidence", "cannot_be_overtaken", "evidence", "voting_hint"]


@dataclass(slots=True)
class Ballot:
    """Holds the votes so far. A tie goes to the answer whose first vote has the lowest number, in any order of arrival.

    Attributes:
        total: most votes there will be.
        weights: by answer, the sum of the weights of its votes.
        first: by answer, the lowest number of its votes.
        counted: number of votes so far, spoilt ones included.
        spoilt: number of votes that named no answer, such as those that ran out of tokens.
    """

    total: int
    weights: dict[str, float] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    counted: int = 0
    spoilt: int = 0

    def add(self, number: int, answer: str | None, weight: float = 1.0) -> None:
        """Counts vote `number`; an answer of None is a spoilt vote.

        Raises:
            ArgumentError: the weight is below 0 or not finite.
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
        """Returns the answer that leads; None without votes."""
        return min(self.weights, key=lambda a: (-self.weights[a], self.first[a]), default=None)

    def decided(self, missing: frozenset[int] | set[int], most: float = 1.0) -> bool:
        """Returns whether the missing votes cannot change the leader: the lossless stop.

        These may also name answers that no vote has named yet; none of them weighs more than `most`.
        """
        if not missing:
            return True
        # This is asked after every vote. While an answer without votes could still win, nothing is decided.
        leader = None if most * len(missing) > max(self.weights.values(), default=0.0) else self.leader
        return leader is not None and cannot_be_overtaken(self, leader, missing, most)

    def shares(self) -> Mapping[str, float]:
        """Returns each answer's share of the weight."""
        whole = sum(self.weights.values()) or 1.0
        return {answer: weight / whole for answer, weight in self.weights.items()}


def cannot_be_overtaken(ballot: Ballot, leader: str, missing: frozenset[int] | set[int], most: float) -> bool:
    """Returns whether `leader` wins even if all missing votes, of weight `most`, go to the best placed other answer.

    The answer with the lowest first vote wins a tie. A missing vote with a lower number may still give another answer
    that place. So a tie counts as lost unless the leader's first vote comes before every missing one and before the
    first vote of the other answer.
    """
    room = most * len(missing)
    lead, first = ballot.weights[leader], ballot.first[leader]
    lowest = min(missing)
    for other, weight in ballot.weights.items():
        reach = weight + room
        if other == leader or reach < lead:
            continue
        if reach > lead or min(ballot.first[other], lowest) < first:
            return False
    # An answer without votes could still get all missing ones, and the lowest of them would be its first.
    return room < lead or (room == lead and first < lowest)


def adaptive_confidence(first: int, second: int) -> float:
    """Returns the probability that the leader is more likely than the runner-up, given their votes and a flat prior.

    This is the Beta(first + 1, second + 1) mass above one half, in closed form: sum over i <= first of C(n, i) / 2^n
    with n = first + second + 1.

    Source: Adaptive-Consistency, arXiv 2305.11860.

    >>> round(adaptive_confidence(4, 0), 3)
    0.969
    """
    if first < 0 or second < 0:
        raise ArgumentError(f"first={first}, second={second}; use votes of 0 or more")
    n = first + second + 1
    return sum(math.comb(n, i) for i in range(first + 1)) / 2**n


def voting_hint(ballot: Ballot) -> str | None:
    """Says why voting will hardly help here; returns None if there is no reason."""
    votes = ballot.counted - ballot.spoilt
    if ballot.counted >= 4 and ballot.spoilt > ballot.counted / 2:
        return f"{ballot.spoilt} of {ballot.counted} samples named no answer; give them more tokens before more votes"
    if votes >= 4 and len(ballot.weights) > 0.8 * votes:
        return f"{votes} samples named {len(ballot.weights)} different answers: a majority of so few means little"
    return None


def evidence(won: int, lost: int) -> float:
    """Measures the evidence of a record of bets against their being fair: 1 means none.

    It is the wealth of a gambler who began with 1 and staked every share from nothing to all of it alike: the mean of
    (1 + s)^won (1 - s)^lost over s from 0 to 1. In closed form this is the sum over i <= won of C(n + 1, i) times
    won! lost! / (n + 1)!, with n = won + lost. If each bet is fair or worse, the chance that it ever reaches w is at
    most 1 / w (Ville's inequality).

    >>> evidence(0, 0), evidence(3, 0)
    (1.0, 3.75)
    """
    n = won + lost
    whole = sum(math.comb(n + 1, i) for i in range(won + 1))
    return whole / (math.comb(n, won) * (n + 1))


@dataclass(slots=True)
class RiskBound:
    """Stops a vote when its result is all but certain.

    Count votes in the order of their numbers. The rule needs votes that are exchangeable, and in the order of ending
    they are not, because short answers come first. Then the chance that it ever stops with another answer than that of
    the full vote is at most `delta`, for any number of answers and any length of the vote.

    Proof: take an answer A, and an answer B that will have at least as many votes as A in the end. While A has no
    fewer votes than B, the next vote for either of them is for B with a chance of one half or more. So a bet on A is
    fair or worse. For the i-th answer to appear, `evidence` of those bets reaches 2^i / delta with a chance of at most
    delta / 2^i, and these chances add up to delta. The rule stops with A when its bets have reached that against every
    other answer, whether it has votes or not.

    Attributes:
        delta: largest chance of another winner.
        counts: votes by answer.
    """

    delta: float
    counts: dict[str, int] = field(default_factory=dict)
    _bets: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, vote: str | None) -> str | None:
        """Counts the next vote; None is a spoilt vote.

        Returns:
            The answer the vote stops with; None if it goes on.
        """
        if vote is None:
            return None
        new = vote not in self.counts
        for other, held in self.counts.items():
            if other == vote:
                continue
            if new:  # it had no votes, so every vote for the other answer but the first was a bet won against it
                self._bets[other, vote], self._bets[vote, other] = [held - 1, 0], [0, 0]
            if held >= self.counts.get(vote, 0):
                self._bets[other, vote][1] += 1
            if not new and self.counts[vote] >= held:
                self._bets[vote, other][0] += 1
        self.counts[vote] = self.counts.get(vote, 0) + 1
        return vote if self._is_certain(vote) else None

    def _is_certain(self, answer: str) -> bool:
        needed = 2.0 ** (1 + list(self.counts).index(answer)) / self.delta
        if evidence(self.counts[answer] - 1, 0) < needed:
            return False
        rivals = (self._bets[answer, other] for other in self.counts if other != answer)
        return all(evidence(won, lost) >= needed for won, lost in rivals)
