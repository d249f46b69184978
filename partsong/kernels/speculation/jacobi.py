"""Guesses by Jacobi iteration: the model's draws after wrong guesses are the guesses for the next step.

A step verifies a window of guesses and draws a token after each of them, also past the first wrong one. These draws,
moved on by what was kept, are the next window. With the row's own noise they are the iterates of a fixed point that is
plain decoding (Song et al., arXiv 2002.03629; Lookahead decoding, arXiv 2402.02057, which also keeps a pool of tails).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import DraftText, Observation
from partsong.kernels.speculation.rates import Rates
from partsong.knobs import Count, Knobs

__all__ = ["Jacobi", "JacobiDrafter"]

#: How likely a guess is assumed to be right before anything is observed, if those before it are.
_PRIOR = 0.35
#: Tails kept for each first token, and the tokens of one.
_TAILS, _TAIL_LENGTH = 4, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Jacobi(Knobs):
    """Guesses with the draws that a step made after wrong guesses.

    It needs no other model. On text of general models it is seldom right; where a step over several tokens costs hardly
    more than one over a single token it helps all the same.

    Attributes:
        window: how many tokens are guessed.

    >>> Jacobi(window=4).build(None, None).layers
    ()
    """

    window: Count = 8

    def build(self, model: Any, tokenizer: Any) -> JacobiDrafter:
        """Makes the drafter, for any model."""
        return JacobiDrafter(self)


@dataclass(slots=True)
class _Iterate:
    """Holds the state of one text.

    Attributes:
        tail: the model's draws for the next positions in the last step.
        guessed: the last proposal.
        pool: token -> what followed it in earlier tails, the latest last.
        rates: how often guesses were right, by depth from 1 on.
    """

    rates: Rates
    tail: list[int] = field(default_factory=list)
    guessed: list[int] = field(default_factory=list)
    pool: dict[int, deque[tuple[int, ...]]] = field(default_factory=dict)


class JacobiDrafter:
    """Drafts by `Jacobi`; see `Drafter`."""

    layers: tuple[int, ...] = ()
    masks: int = 0

    def __init__(self, knobs: Jacobi) -> None:
        self._window = knobs.window
        self._iterates: WeakKeyDictionary[DraftText, _Iterate] = WeakKeyDictionary()

    def propose(self, texts: Sequence[DraftText], rooms: Sequence[int]) -> list[DraftTree]:
        """Guesses the last step's draws, refilled from the pool, and what the pool says follows the last token."""
        drafts = list[DraftTree]()
        for text, room in zip(texts, rooms, strict=True):
            state, size = self._iterate(text), min(room, self._window)
            window = state.tail[:size]
            while len(window) < size:
                before = window[-1] if window else text.tokens[-1]
                known = state.pool.get(before)
                window += known[-1][: size - len(window)] if known else (before,)
            state.guessed = window
            others = [tail[:size] for tail in state.pool.get(text.tokens[-1], ())]
            chances = [state.rates[depth] for depth in range(1, size + 1)]
            drafts.append(DraftTree.union([DraftTree.chain(each, chances[: len(each)]) for each in (window, *others)]))
        return drafts

    def observe(self, text: DraftText, seen: Observation) -> None:
        """Takes the draws past the kept tokens as the next window, and puts them into the pool."""
        state, drawn = self._iterate(text), seen.match.drawn
        nodes = seen.draft.along(state.guessed)
        for depth in range(1, min(len(nodes), len(seen.match.tokens) + 1)):
            is_right = nodes[depth] in seen.match.path
            state.rates.see(depth, is_right)
            if not is_right:
                break
        if len(nodes) == 1:
            state.rates.rest()
        fresh = [drawn[node] for node in nodes[len(seen.match.tokens) :]]
        # Where nothing was verified, the old guesses are still the best there are for the places they were made for.
        state.tail = fresh or state.tail[len(seen.match.tokens) :]
        for first, token in enumerate(fresh[:-1]):
            tails = state.pool.setdefault(token, deque(maxlen=_TAILS))
            tail = tuple(fresh[first + 1 : first + 1 + _TAIL_LENGTH])
            if tail not in tails:
                tails.append(tail)

    def forget(self, text: DraftText) -> None:
        """Drops the guesses for a text."""
        self._iterates.pop(text, None)

    def _iterate(self, text: DraftText) -> _Iterate:
        if text not in self._iterates:
            prior = dict.fromkeys(range(1, self._window + 1), _PRIOR)
            self._iterates[text] = _Iterate(Rates(prior))
        return self._iterates[text]
