"""Lets several drafters guess for all texts of a step, and shows them what came of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from partsong.kernels.keyed_draw import TokenDraw
from partsong.kernels.speculation.budget import within_budget
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import Drafter, DraftText, Observation
from partsong.kernels.speculation.match import Match

__all__ = ["Speculator"]


@dataclass(slots=True)
class Speculator:
    """Makes the drafts of a step for texts that come and go; each has a key of the caller's.

    Attributes:
        drafters: who guesses. Their guesses become one tree; without drafters there are none.
        costs: what a step over 1, 2, ... tokens costs; no step has more of them, unless there are more texts.
    """

    drafters: tuple[Drafter, ...] = ()
    costs: tuple[float, ...] = (1.0,)
    _texts: dict[Hashable, DraftText] = field(init=False, default_factory=dict)

    @property
    def layers(self) -> tuple[int, ...]:
        """Lists the layers whose states drafters want, each once."""
        return tuple(sorted({layer for drafter in self.drafters for layer in drafter.layers}))

    def join(self, key: Hashable, text: DraftText) -> None:
        """Takes a text in."""
        if self.drafters:
            self._texts[key] = text

    def leave(self, key: Hashable) -> None:
        """Lets a text go."""
        text = self._texts.pop(key, None)
        if text is not None:
            for drafter in self.drafters:
                drafter.forget(text)

    def reset(self) -> None:
        """Lets all texts go."""
        for key in list(self._texts):
            self.leave(key)

    def propose(self, keys: Sequence[Hashable], rooms: Sequence[int]) -> list[DraftTree]:
        """Guesses what follows each text, at most `rooms` tokens deep; empty if nothing is worth its cost."""
        if not self.drafters:
            return []
        texts = [self._texts[key] for key in keys]
        proposals = [drafter.propose(texts, rooms) for drafter in self.drafters]
        drafts = [own[0] if len(own) == 1 else DraftTree.union(own) for own in zip(*proposals, strict=True)]
        kept = within_budget(drafts, self.costs)
        return kept if any(map(len, kept)) else []

    def observe(
        self, key: Hashable, draw: TokenDraw, draft: DraftTree, match: Match, hidden: Tensor | None = None
    ) -> None:
        """Takes the tokens that a step gave and shows all drafters what came of it.

        Args:
            key: the text's.
            draw: how its next token is drawn.
            draft: what was verified.
            match: what came of it.
            hidden: the states of `layers` at every node, `[1 + len(draft), layers, hidden size]`.
        """
        if not self.drafters:
            return
        text, layers = self._texts[key], self.layers
        text.tokens += match.tokens
        text.draw = draw
        for drafter in self.drafters:
            own = None
            if hidden is not None and drafter.layers:
                own = hidden[:, [layers.index(layer) for layer in drafter.layers]]
            drafter.observe(text, Observation(draft, match, own))
