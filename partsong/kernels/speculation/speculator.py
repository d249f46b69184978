"""Lets several drafters guess for all texts of a step, and shows them the outcome."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from partsong.errors import ArgumentError
from partsong.kernels.keyed_draw import TokenDraw
from partsong.kernels.speculation.budget import with_masks, within_budget
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import ClosingDrafter, Drafter, DraftText, Observation, PromptReader
from partsong.kernels.speculation.lengths import AcceptedLengths
from partsong.kernels.speculation.match import Match

__all__ = ["Speculator"]

#: How many more tokens a step with guesses is assumed to give before anything is observed, and how fast it is learned.
_GAIN, _LEARN = 2.0, 0.05


@dataclass(slots=True)
class Speculator:
    """Makes the drafts of a step for texts that come and go; each has a key of the caller's.

    Attributes:
        drafters: the drafters, whose guesses become one tree; without drafters there are none.
        costs: costs of steps over 1, 2, ... tokens; no step has more of them, unless there are more texts.
        ends: tokens that end a text.
        vocabulary: how many tokens the model has; None where any number may be one.
        lengths: how many tokens steps gave, by their place in the answer; counted where there are drafters.
    """

    drafters: tuple[Drafter, ...] = ()
    costs: tuple[float, ...] = (1.0,)
    ends: frozenset[int] = frozenset()
    vocabulary: int | None = None
    lengths: AcceptedLengths = field(init=False, default_factory=AcceptedLengths)
    _texts: dict[Hashable, DraftText] = field(init=False, default_factory=dict)
    #: Average gain in tokens of a step when masks followed the last token of the previous step.
    _gain: float = field(init=False, default=_GAIN)

    @property
    def layers(self) -> tuple[int, ...]:
        """Lists the layers whose states drafters want, each once."""
        return tuple(sorted({layer for drafter in self.drafters for layer in drafter.layers}))

    @property
    def masks(self) -> int:
        """Returns how many masks drafters need after a token."""
        return max((drafter.masks for drafter in self.drafters), default=0)

    @property
    def reads_prompts(self) -> bool:
        """Says whether a drafter wants the states of prompts."""
        return any(isinstance(drafter, PromptReader) for drafter in self.drafters)

    def join(self, key: Hashable, text: DraftText, ahead: Tensor | None = None, before: Tensor | None = None) -> None:
        """Adds a text.

        Args:
            key: the caller's.
            text: the text; with masks after its prompt, it includes the first token.
            ahead: states of the prompt's last token and of the masks, `[1 + masks, layers, hidden size]`.
            before: states of the tokens before the text's last one, `[tokens, layers, hidden size]`, as far back as
                they are known.
        """
        if not self.drafters:
            return
        self._texts[key] = text
        if before is not None:
            self.read_prompt(key, before)
        if ahead is not None and self.masks:
            seen = Match((text.tokens[-1],), (0,), (text.tokens[-1],))
            self._show(text, DraftTree(masks=(len(ahead) - 1,)), seen, ahead)

    def read_prompt(self, key: Hashable, before: Tensor) -> None:
        """Shows drafters that read prompts the states before a text's last token, as in `join`."""
        for drafter in self.drafters:
            if isinstance(drafter, PromptReader):
                drafter.read_prompt(self._texts[key], self._own(drafter, before))

    def leave(self, key: Hashable) -> None:
        """Forgets a text."""
        text = self._texts.pop(key, None)
        if text is not None:
            for drafter in self.drafters:
                drafter.forget(text)

    def reset(self) -> None:
        """Forgets all texts."""
        for key in list(self._texts):
            self.leave(key)

    def close(self) -> None:
        """Closes drafters that hold something."""
        for drafter in self.drafters:
            if isinstance(drafter, ClosingDrafter):
                drafter.close()

    def propose(self, keys: Sequence[Hashable], rooms: Sequence[int]) -> list[DraftTree]:
        """Guesses what follows each text, at most `rooms` tokens deep; empty if nothing pays off.

        A guess beyond a text's room, or of no token, is left out, whoever made it.

        Raises:
            ArgumentError: a drafter proposed something other than a tree for each text.
        """
        if not self.drafters:
            return []
        texts = [self._texts[key] for key in keys]
        proposals = [self._trees(drafter, texts, rooms) for drafter in self.drafters]
        drafts = [own[0] if len(own) == 1 else DraftTree.union(own) for own in zip(*proposals, strict=True)]
        kept = within_budget(drafts, self.costs, self.ends)
        if self.masks:
            kept = with_masks(kept, self.costs, rooms, self.masks, self._gain, self.ends)
        return kept if any(draft.num_rows > 1 for draft in kept) else []

    def _trees(self, drafter: Drafter, texts: Sequence[DraftText], rooms: Sequence[int]) -> list[DraftTree]:
        trees: Any = drafter.propose(texts, rooms)
        if not isinstance(trees, Sequence) or len(trees) != len(texts) or not all(map(_is_tree, trees)):
            raise ArgumentError(
                f"{type(drafter).__name__} was asked for a DraftTree for each of {len(texts)} texts and proposed "
                f"{trees!r:.200}"
            )
        return [tree.within(room, self.vocabulary) for tree, room in zip(trees, rooms, strict=True)]

    def observe(
        self, key: Hashable, draw: TokenDraw, draft: DraftTree, match: Match, hidden: Tensor | None = None
    ) -> None:
        """Takes the tokens of a step and shows all drafters the outcome.

        Args:
            key: the text's.
            draw: how its next token is drawn.
            draft: the verified draft.
            match: its result.
            hidden: the states of `layers` at every node and mask, `[draft.num_rows, layers, hidden size]`.
        """
        if not self.drafters:
            return
        text = self._texts[key]
        text.tokens += match.tokens
        text.draw = draw
        self.lengths.see(draw.place - len(match.tokens), len(match.tokens))
        if len(draft):
            self._gain += _LEARN * (len(match.tokens) - 1 - self._gain)
        self._show(text, draft, match, hidden)

    def _show(self, text: DraftText, draft: DraftTree, match: Match, hidden: Tensor | None) -> None:
        for drafter in self.drafters:
            own = self._own(drafter, hidden) if hidden is not None and drafter.layers else None
            drafter.observe(text, Observation(draft, match, own))

    def _own(self, drafter: Any, states: Tensor) -> Tensor:
        """Returns the states of the layers that a drafter wants."""
        layers = self.layers
        return states[:, [layers.index(layer) for layer in drafter.layers]]


def _is_tree(value: object) -> bool:
    return isinstance(value, DraftTree)
