"""Collects guesses at the next places of a text, of which the first is continued, and learns how often they hold."""

from __future__ import annotations

from collections.abc import Sequence

from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.rates import Rates

__all__ = ["GuessChain"]

#: How likely a guess is assumed to be right before anything is observed, if those before it are; the second less so.
_FIRST, _SECOND = 0.6, 0.15


class GuessChain:
    """Holds the guesses of an unfinished draft, place by place.

    Args:
        length: how many places are guessed at most.

    Attributes:
        guesses: for each place its guesses, the one that is continued first.
        rates: how often guesses of each depth were right; alternatives to the first have negative depths.

    >>> chain = GuessChain(2)
    >>> chain.add([7, 9])
    >>> chain.add([8])
    >>> chain.tree().tokens, chain.tree().parents
    ((7, 9, 8), (0, 0, 1))
    """

    def __init__(self, length: int) -> None:
        prior = {depth: _FIRST if depth > 0 else _SECOND for depth in range(-length, length + 1)}
        self.rates, self.guesses = Rates(prior), list[list[int]]()
        self._chances: list[float | None] = []

    def add(self, guesses: list[int], chance: float | None = None) -> None:
        """Adds the guesses for the next place; a drafter that knows how likely the first is says so."""
        self.guesses.append(guesses)
        self._chances.append(chance)

    def clear(self) -> None:
        """Begins a new draft."""
        self.guesses, self._chances = [], []

    def tree(self) -> DraftTree:
        """Returns the draft."""
        tokens, parents, chances, last = list[int](), list[int](), list[float](), 0
        for depth, (guesses, chance) in enumerate(zip(self.guesses, self._chances, strict=True), 1):
            tokens += guesses
            parents += [last] * len(guesses)
            first = self.rates[depth] if chance is None else chance
            chances += [first, *[self.rates[-depth]] * (len(guesses) - 1)]
            last = len(tokens) - len(guesses) + 1
        return DraftTree(tuple(tokens), tuple(parents), tuple(chances))

    def learn(self, drawn: Sequence[int]) -> None:
        """Learns from the tokens that the model drew, as far as they follow the draft."""
        if not self.guesses:
            self.rates.rest()
        for depth, (guesses, token) in enumerate(zip(self.guesses, drawn, strict=False), 1):
            self.rates.see(depth, guesses[0] == token)
            if guesses[0] != token:
                self.rates.see(-depth, token in guesses)
                break
