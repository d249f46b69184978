"""Guesses with a head that was trained for the model: it looks several tokens ahead in the model's own forward.

Masks follow the tokens that a step verifies. From those after the last right one a small sampler makes the next
guesses, so fresh ones are ready whichever guess was the last to be right (multi-token prediction, arXiv 2507.11851,
section 3, with its quadratic decoding; here masks stand where they are likely to be of use). It draws with the noise of
the text (arXiv 2408.07978).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.keyed_draw import TokenDraw, noisy_logits
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import DraftText, Observation
from partsong.kernels.speculation.rates import Rates
from partsong.knobs import Count, Knobs, Number
from partsong.reasoning.local.mask_head import MaskHead, digest_of, load_head
from partsong.reasoning.local.model import LocalModel

__all__ = ["HeadDrafter", "TrainedHead"]

#: The folder beside a model's weights that holds its head.
_BESIDE = "head"
#: The further a guess's noisy logit leads the next one's, the likelier it is right. These are the steps of that lead,
#: and the chances assumed before anything is observed: of the first guess, and of the second if the first is wrong.
_LEADS = (0.1, 0.3, 0.7, 1.5, 3.0, 6.0)
_FIRST = (0.4, 0.45, 0.6, 0.75, 0.88, 0.95, 0.99)
_SECOND = (0.6, 0.7, 0.65, 0.75, 0.7, 0.7, 0.5)
#: The draft continues from a guess only if it and all before it are right with at least this chance.
_LEAST = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedHead(Knobs):
    """Guesses with a head that was trained for this model (`zoo/recipes/train_heads.py`).

    Attributes:
        path: the folder of the head. Default: the folder "head" beside the model's weights.
        length: how many tokens are guessed at most. Default: as many as the head has masks.
        branches: how many guesses follow each guess, and how many are continued in parallel.
        heat: temperature of guesses relative to that of the text, whose noise they are drawn with. A head knows less
            than its model and is less sure, which lower temperatures compensate; 0 takes the likeliest tokens.
    """

    path: str | Path | None = None
    length: Count | None = None
    branches: Count = 2
    heat: Annotated[float, Number(0)] = 0.6

    def build(self, model: LocalModel, tokenizer: Any) -> HeadDrafter:
        """Loads the head and lets its masks take part in the model's forwards.

        Raises:
            ArgumentError: there is no head, or the model has one already.
            UnsupportedError: it was trained for another model.
        """
        if self.path is None and not model.source:
            raise ArgumentError("the model was not loaded from a folder that may hold its head: give head:path=FOLDER")
        head = load_head(Path(model.source) / _BESIDE if self.path is None else Path(self.path).expanduser())
        own = {
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "vocabulary": digest_of(tokenizer.get_vocab()),
        }
        _check_same(head, own)
        head.to(model.device, model.dtype)
        model.take_masks(head.masks)
        return HeadDrafter(head, model, self, end=tokenizer.eos_token_id)


def _check_same(head: MaskHead, own: Mapping[str, Any]) -> None:
    for name, value in own.items():
        if (asked := getattr(head.settings, name)) != value:
            raise UnsupportedError(
                f"this head was trained for another model, whose {name} is {asked}; that of this model is {value}: "
                f"give the head of this model, or train one with zoo/recipes/train_heads.py"
            )


@dataclass(slots=True)
class _Growing:
    """Holds a tree of guesses at a text in the making.

    Attributes:
        text: the text.
        size: how deep it may become.
        tokens: its guesses.
        parents: the node before each.
        chances: how likely each is right if its parent is.
        leads: for each node that has children the first of them, and how far that one lies ahead (as a kind).
        ends: the nodes from which it continues, with their token and the chance that all up to there is right.
    """

    text: DraftText
    size: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    leads: dict[int, tuple[int, int]] = field(default_factory=dict)
    ends: list[tuple[int, int, float]] = field(default_factory=list)

    def tree(self) -> DraftTree:
        """Returns the tree."""
        return DraftTree(tuple(self.tokens), tuple(self.parents), tuple(self.chances))


class HeadDrafter:
    """Drafts by `TrainedHead`; see `Drafter`.

    Args:
        head: the trained head, whose masks are in the model.
        model: the model.
        knobs: the knobs.
        end: the token that ends a text, after which nothing is guessed.
    """

    layers: tuple[int, ...] = (-1,)

    def __init__(self, head: MaskHead, model: LocalModel, knobs: TrainedHead, *, end: int | None = None) -> None:
        self.masks: int = min(knobs.length or head.settings.num_masks, head.settings.num_masks)
        self._sampler, self._model, self._knobs, self._end = head.sampler, model, knobs, end
        self._states: WeakKeyDictionary[DraftText, Tensor] = WeakKeyDictionary()
        self._proposed: WeakKeyDictionary[DraftText, tuple[_Growing, DraftTree]] = WeakKeyDictionary()
        # Rates learned from one text serve all, since an answer may be too short to learn them.
        self._rates = Rates(dict(enumerate(_FIRST)), weight=20.0, memory=0.995)
        self._second = Rates(dict(enumerate(_SECOND)), weight=10.0, memory=0.99)

    def propose(self, texts: Sequence[DraftText], rooms: Sequence[int]) -> list[DraftTree]:
        """Draws from the masks after each text, position by position."""
        growing = [
            _Growing(text, min(room, len(self._states[text])), ends=[(0, text.tokens[-1], 1.0)])
            for text, room in zip(texts, rooms, strict=True)
            if room > 0 and text in self._states
        ]
        self._proposed.clear()
        if growing:
            self._grow(growing)
        for each in growing:
            self._proposed[each.text] = (each, each.tree())
        return [self._proposed[text][1] if text in self._proposed else DraftTree() for text in texts]

    def observe(self, text: DraftText, seen: Observation) -> None:
        """Learns how often guesses of each kind are right, and keeps the states of the masks that are next."""
        if (proposed := self._proposed.pop(text, None)) is not None:
            self._learn(*proposed, seen.match.tokens)
        self._states.pop(text, None)
        masks = seen.draft.masks_after(seen.match.path[-1])
        if seen.hidden is not None and masks.stop > masks.start:
            self._states[text] = seen.hidden[masks, 0]

    def forget(self, text: DraftText) -> None:
        """Forgets a text."""
        self._states.pop(text, None)
        self._proposed.pop(text, None)

    def _learn(self, growing: _Growing, tree: DraftTree, tokens: Sequence[int]) -> None:
        for node, token in zip(tree.along(tokens), tokens, strict=False):
            if node not in growing.leads:
                break
            first, lead = growing.leads[node]
            is_right = tree.tokens[first - 1] == token
            self._rates.see(lead, is_right)
            if not is_right:
                self._second.see(lead, tree.child(node, token) is not None)

    def _grow(self, growing: Sequence[_Growing]) -> None:
        """Makes the guesses of several texts at once."""
        states = [self._states[each.text] for each in growing]
        padded = states[0][None] if len(states) == 1 else torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
        prepared = self._sampler.prepare(padded)
        for place in range(max(each.size for each in growing)):
            ends = [(text, *end) for text, each in enumerate(growing) if place < each.size for end in each.ends]
            if not ends:
                break
            rows = torch.tensor([text for text, *_ in ends], device=padded.device)
            before = self._model.embed([token for _, _, token, _ in ends])
            logits = self._model.read(self._sampler.step(padded[:, place][rows], prepared[:, place][rows], before))
            noisy = noisy_logits(logits, [self._draw_at(growing[text].text, place) for text, *_ in ends])
            # The lead needs a second one, even where only the first is guessed.
            best = noisy.topk(max(2, self._knobs.branches), dim=-1)
            for each in growing:
                each.ends.clear()
            for (text, node, _, reached), values, tokens in zip(ends, *(x.tolist() for x in best), strict=True):
                self._branch(growing[text], node, reached, values, tokens)
            for each in growing:
                each.ends = sorted(each.ends, key=lambda end: -end[2])[: self._knobs.branches]

    def _branch(
        self, growing: _Growing, node: int, reached: float, values: Sequence[float], tokens: Sequence[int]
    ) -> None:
        """Adds the guesses that follow a node."""
        num, lead = self._knobs.branches, bisect(_LEADS, values[0] - values[1])
        rate = self._rates[lead]
        others = (1 - rate) * self._second[lead] / max(1, num - 1)
        growing.leads[node] = (len(growing.tokens) + 1, lead)
        for number, token in enumerate(tokens[:num]):
            chance = others if number else rate
            growing.tokens.append(token)
            growing.parents.append(node)
            growing.chances.append(chance)
            if reached * chance >= _LEAST and token != self._end:
                growing.ends.append((len(growing.tokens), token, reached * chance))

    def _draw_at(self, text: DraftText, place: int) -> TokenDraw:
        """Says how the guess for a place after the next one is drawn."""
        draw = text.draw
        return TokenDraw(draw.temperature * self._knobs.heat, draw.top_p, draw.seed, draw.place + place)
