"""Guesses with a drafter that was published for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.kernels.keyed_draw import likely_draws
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import DraftText, Observation
from partsong.kernels.speculation.guess_chain import GuessChain
from partsong.kernels.speculation.published.checkpoint import read_checkpoint
from partsong.kernels.speculation.published.networks import BlockNetwork, DraftedText, EagleNetwork, network_of
from partsong.knobs import Count, Knobs

__all__ = ["Published", "PublishedDrafter"]

#: How many tokens EAGLE-3 guesses, which may go on for as long as it likes.
_LENGTH = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Published(Knobs):
    """Guesses with a drafter that was published for the model: EAGLE-3, DFlash or DSpark.

    Attributes:
        path: its folder or hub id, with ``config.json`` and safetensors.
        length: how many tokens are guessed at most. Default: 5 for EAGLE-3, and the block it was trained for otherwise.
        branches: how many guesses are made for each place; only the first is continued.
    """

    path: str | Path
    length: Count | None = None
    branches: Count = 1

    def build(self, model: Any, tokenizer: Any) -> PublishedDrafter:
        """Loads the drafter.

        Raises:
            ArgumentError: there is no such drafter, it cannot be read, or it guesses fewer tokens than are asked for.
            UnsupportedError: it is of another kind, or was made for another model.
        """
        return PublishedDrafter(model, self)


class PublishedDrafter:
    """Drafts by `Published`; see `Drafter`.

    Args:
        model: what it drafts for; see `DraftTarget`.
        knobs: the knobs.

    Attributes:
        layers: the model's layers whose states it reads.
        masks: none.
    """

    masks: int = 0

    def __init__(self, model: Any, knobs: Published) -> None:
        read = read_checkpoint(knobs.path, model)
        self.layers, self._network, self._branches = read.layers, network_of(read, model), knobs.branches
        most = self._network.num_guesses if isinstance(self._network, BlockNetwork) else None
        if most is not None and knobs.length is not None and knobs.length > most:
            raise ArgumentError(f"length={knobs.length}, and this drafter guesses {most} tokens; leave length out")
        self._length = knobs.length or most or _LENGTH
        self._texts: WeakKeyDictionary[DraftText, tuple[DraftedText, GuessChain]] = WeakKeyDictionary()

    def read_prompt(self, text: DraftText, states: Tensor) -> None:
        """Takes in the states before a text's last token, `[tokens, layers, hidden size]`, as far back as they go."""
        if text.plain and len(states):
            self._open(text, len(text.tokens) - 1 - len(states)).states.append(states)

    def propose(self, texts: Sequence[DraftText], rooms: Sequence[int]) -> list[DraftTree]:
        """Guesses what follows each text."""
        most = {
            text: min(room, self._length)
            for text, room in zip(texts, rooms, strict=True)
            if room > 0 and text in self._texts and self._texts[text][0].states
        }
        for text in most:
            self._texts[text][1].clear()
        if most:
            with torch.inference_mode():
                self._guess(most)
        return [self._texts[text][1].tree() if text in most else DraftTree() for text in texts]

    def observe(self, text: DraftText, seen: Observation) -> None:
        """Learns how often guesses of each place are right, and keeps the states of the tokens that are new."""
        if seen.hidden is None or not text.plain:
            return
        path = list(seen.match.path)
        if text not in self._texts:  # the prompt's states are not there
            self._open(text, len(text.tokens) - 1 - len(path))
        drafted, chain = self._texts[text]
        drafted.states.append(seen.hidden[path])
        chain.learn(seen.match.tokens)
        chain.clear()

    def forget(self, text: DraftText) -> None:
        """Forgets a text."""
        self._texts.pop(text, None)

    def _open(self, text: DraftText, first: int) -> DraftedText:
        drafted = self._network.open(first)
        self._texts[text] = drafted, GuessChain(self._length)
        return drafted

    def _guess(self, most: dict[DraftText, int]) -> None:
        texts = [*most]
        drafted, last = [self._texts[text][0] for text in texts], [text.tokens[-1] for text in texts]
        if isinstance(self._network, EagleNetwork):
            self._guess_on(self._network, texts, drafted, most)
            return
        self._network.catch_up(drafted)
        states = self._network.block(drafted, last)
        logits = self._network.logits(states)
        for place in range(max(most.values())):
            here = self._network.over_model(self._network.after(logits[:, place], last))
            last = self._add(texts, here, self._network.chances(states[:, place], last), most)

    def _guess_on(
        self, network: EagleNetwork, texts: list[DraftText], drafted: list[DraftedText], most: dict[DraftText, int]
    ) -> None:
        """Guesses token after token, and forgets the keys of guesses afterwards."""
        begins = [text.end + 1 for text in drafted]
        following = [text.tokens[begin:] for text, begin in zip(texts, begins, strict=True)]
        state = network.catch_up(drafted, following)
        ends = [text.kept[0].end for text in drafted]
        for place in range(max(most.values())):
            last = self._add(texts, network.over_model(network.logits(state)), None, most)
            if place + 1 < max(most.values()):
                state = network.step(drafted, last, state)
        for text, end in zip(drafted, ends, strict=True):
            text.kept[0].end = end

    def _add(
        self, texts: list[DraftText], logits: Tensor, chances: list[float] | None, most: dict[DraftText, int]
    ) -> list[int]:
        """Adds the guesses for the next place of each text that has room; returns the first guess of each."""
        chains = [self._texts[text][1] for text in texts]
        draws = [
            replace(text.draw, place=text.draw.place + len(chain.guesses))
            for text, chain in zip(texts, chains, strict=True)
        ]
        guesses = likely_draws(logits, draws, self._branches)
        for number, (text, chain, own) in enumerate(zip(texts, chains, guesses, strict=True)):
            if len(chain.guesses) < most[text]:
                chain.add(own, None if chances is None else chances[number])
        return [own[0] for own in guesses]
