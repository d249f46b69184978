"""Learns how often guesses of each kind are right."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Rates"]


class Rates:
    """Keeps a moving share of right guesses for each kind of guess.

    Args:
        prior: the share of a kind without observations.
        weight: how many guesses the prior counts for.
        memory: how much a guess still counts after the next one.

    >>> rates = Rates({1: 0.5}, weight=2.0)
    >>> rates.see(1, True)
    >>> round(rates[1], 2)
    0.67
    """

    def __init__(self, prior: Mapping[int, float], *, weight: float = 4.0, memory: float = 0.97) -> None:
        self._prior, self._memory = prior, memory
        # Right guesses and all guesses, with what the prior counts for.
        self._seen = {kind: (share * weight, weight) for kind, share in prior.items()}

    def __getitem__(self, kind: int) -> float:
        right, count = self._seen[kind]
        return right / count

    def see(self, kind: int, is_right: bool) -> None:
        """Takes a guess into account."""
        right, count = self._seen[kind]
        self._seen[kind] = (right * self._memory + is_right, count * self._memory + 1)

    def rest(self, pull: float = 0.02) -> None:
        """Moves all shares a little towards their prior, so that an abandoned kind is tried again."""
        for kind, (right, count) in self._seen.items():
            self._seen[kind] = (right + pull * (self._prior[kind] * count - right), count)
