"""Guesses with a head that was trained for the model: it looks several tokens ahead in the model's own forward.

Masks stand behind the tokens that a step verifies. From those behind the last right one a small sampler makes the next
guesses, so fresh ones are there whichever guess was the last to be right (multi-token prediction, arXiv 2507.11851,
section 3, with its quadratic decoding; here masks stand where they are likely to be of use). It draws with the noise of
the text (arXiv 2408.07978).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.keyed_draw import TokenDraw, noisy_logits
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import DraftText, Observation
from partsong.kernels.speculation.rates import Rates
from partsong.knobs import Count, check_fields
from partsong.reasoning.local.mask_head import MaskHead, digest_of, load_head
from partsong.reasoning.local.model import LocalModel

__all__ = ["HeadDrafter", "TrainedHead"]

#: The folder beside a model's weights that holds its head.
_BESIDE = "head"
#: A guess is the surer the further its noisy logit lies ahead of the next one's. The steps of that lead, and how likely
#: a guess of each is right before anything is seen; and the second guess, where the first one is wrong.
_LEADS = (0.1, 0.3, 0.7, 1.5, 3.0, 6.0)
_FIRST = (0.4, 0.5, 0.6, 0.75, 0.88, 0.96, 0.99)
_SECOND = (0.6, 0.55, 0.5, 0.45, 0.4, 0.3, 0.2)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedHead:
    """Guesses with a head that was trained for this model (`recipes/train_heads.py`).

    Attributes:
        path: the folder of the head. Default: the folder "head" beside the model's weights.
        length: how many tokens are guessed at most. Default: as many as the head has masks.
        branches: how many guesses are made for each place; only the first is continued.
        noise: whether guesses are drawn with the noise of the text. Without it they are the likeliest tokens, which are
            right less often above temperature 0.
    """

    path: str | Path | None = None
    length: Count | None = None
    branches: Count = 1
    noise: bool = True

    def validate(self) -> None:
        """Checks the knobs.

        Raises:
            ArgumentError: one is out of bounds.
        """
        check_fields(self)

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
                f"give the head of this model, or train one with recipes/train_heads.py"
            )


@dataclass(slots=True)
class _Guess:
    """Holds the guesses for a place, the one that is continued first, and how far it lies ahead (as a kind)."""

    tokens: list[int]
    lead: int


class HeadDrafter:
    """Drafts by `TrainedHead`; see `Drafter`.

    Args:
        head: the trained head; the model knows its masks.
        model: the model.
        knobs: the knobs.
        end: the token that ends a text, after which nothing is guessed.
    """

    layers: tuple[int, ...] = (-1,)

    def __init__(self, head: MaskHead, model: LocalModel, knobs: TrainedHead, *, end: int | None = None) -> None:
        self.masks: int = min(knobs.length or head.settings.num_masks, head.settings.num_masks)
        self._sampler, self._model, self._knobs, self._end = head.sampler, model, knobs, end
        self._states: WeakKeyDictionary[DraftText, Tensor] = WeakKeyDictionary()
        self._guesses: WeakKeyDictionary[DraftText, list[_Guess]] = WeakKeyDictionary()
        # What is learned of one text serves all: answers may be shorter than that takes.
        self._rates = Rates(dict(enumerate(_FIRST)), weight=20.0, memory=0.995)
        self._second = Rates(dict(enumerate(_SECOND)), weight=10.0, memory=0.99)

    def propose(self, texts: Sequence[DraftText], rooms: Sequence[int]) -> list[DraftTree]:
        """Draws from the masks behind each text, left to right."""
        sizes = {
            text: min(room, len(self._states[text]))
            for text, room in zip(texts, rooms, strict=True)
            if room > 0 and text in self._states
        }
        self._guesses.clear()
        if sizes:
            self._draw(sizes)
        return [self._tree(self._guesses.get(text, [])) for text in texts]

    def observe(self, text: DraftText, seen: Observation) -> None:
        """Learns how often guesses of each kind are right, and keeps the states of the masks that are next."""
        for guess, token in zip(self._guesses.pop(text, ()), seen.match.tokens, strict=False):
            self._rates.see(guess.lead, guess.tokens[0] == token)
            if guess.tokens[0] != token:
                self._second.see(guess.lead, token in guess.tokens)
                break
        self._states.pop(text, None)
        masks = seen.draft.masks_after(seen.match.path[-1])
        if seen.hidden is not None and masks.stop > masks.start:
            self._states[text] = seen.hidden[masks, 0]

    def forget(self, text: DraftText) -> None:
        """Drops what it knows of a text."""
        self._states.pop(text, None)
        self._guesses.pop(text, None)

    def _draw(self, sizes: Mapping[DraftText, int]) -> None:
        """Makes the guesses of several texts at once, place after place."""
        left = dict(sizes)
        states = [self._states[text] for text in sizes]
        padded = states[0][None] if len(states) == 1 else torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
        prepared, last = self._sampler.prepare(padded), [text.tokens[-1] for text in sizes]
        for place in range(max(sizes.values())):
            out = self._sampler.step(padded[:, place], prepared[:, place], self._model.embed(last))
            draws = [self._draw_at(text, place) for text in sizes]
            noisy = noisy_logits(self._model.read(out), draws)
            # The lead needs a second one, even where only the first is guessed.
            values, tokens = (each.tolist() for each in noisy.topk(max(2, self._knobs.branches), dim=-1))
            last = [own[0] for own in tokens]
            for text, best, own in zip(sizes, values, tokens, strict=True):
                if left[text] > 0:
                    guess = _Guess(own[: self._knobs.branches], bisect(_LEADS, best[0] - best[1]))
                    self._guesses.setdefault(text, []).append(guess)
                    left[text] = 0 if own[0] == self._end else left[text] - 1
            if not any(left.values()):
                break

    def _draw_at(self, text: DraftText, place: int) -> TokenDraw:
        """Says how the guess for a place after the next one is drawn."""
        heat = text.draw.temperature if self._knobs.noise else 0.0
        return replace(text.draw, place=text.draw.place + place, temperature=heat)

    def _tree(self, guesses: Sequence[_Guess]) -> DraftTree:
        tokens, parents, chances, last = list[int](), list[int](), list[float](), 0
        for guess in guesses:
            rate = self._rates[guess.lead]
            others = (1 - rate) * self._second[guess.lead]
            tokens += guess.tokens
            parents += [last] * len(guess.tokens)
            chances += [rate, *[others / max(1, len(guess.tokens) - 1)] * (len(guess.tokens) - 1)]
            last = len(tokens) - len(guess.tokens) + 1
        return DraftTree(tuple(tokens), tuple(parents), tuple(chances))
