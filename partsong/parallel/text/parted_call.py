"""Notes how a model calls its layers, and then calls them for one part of its rows after another.

A model computes embeddings, positions and masks for a whole call before its layers. While a call is noted, states pass
unchanged through all layers, so after the last one it is known what each is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.cuts.relay import Relay
from partsong.parallel.ranks.shards import offsets
from partsong.parallel.text.cut_calls import LayerCall, cut_rows, cut_tokens, states_of, with_states
from partsong.parallel.text.kept_keys import CutKeys, cache_of

__all__ = ["CutRow", "NotAChainError", "PartedCall"]


class NotAChainError(Exception):
    """Tells that a model changes states between its layers, or calls these in another order."""


@dataclass(frozen=True, slots=True)
class CutRow:
    """Says how the tokens of one row are cut, where it holds several texts.

    Attributes:
        sizes: tokens of each part.
        begin: is called with the number of each part before its layers run.
    """

    sizes: tuple[int, ...]
    begin: Callable[[int], None]


class PartedCall:
    """Notes one call of a model, and makes it in parts.

    Args:
        layers: those of the model.
        owners: the rank of each.
        relay: takes states from rank to rank.
        sizes: rows of each part.
        row: cuts the tokens of one row in the place of rows.

    Attributes:
        whole: why the call was made as a whole; None if it was made in parts.
        is_noted: whether all layers were called.
    """

    def __init__(
        self, layers: nn.ModuleList, owners: Sequence[int], relay: Relay, sizes: Sequence[int], row: CutRow | None
    ) -> None:
        self.layers, self.owners, self.relay, self.row = layers, owners, relay, row
        self.whole: str | None = None
        sizes = sizes if row is None else row.sizes
        self._parts = [slice(first, first + size) for first, size in zip(offsets(sizes), sizes, strict=True)]
        self._total = sum(sizes)
        self._forwards = [layer.forward for layer in layers]
        self._own = [vars(layer).get("forward") for layer in layers]
        self._calls: list[LayerCall] = []
        for number, layer in enumerate(layers):
            vars(layer)["forward"] = partial(self._note, number)

    @property
    def is_noted(self) -> bool:
        """Says whether all layers were called."""
        return len(self._calls) == len(self.layers)

    def end(self) -> None:
        """Puts the layers' own calls back; may be called again."""
        for layer, own in zip(self.layers, self._own, strict=False):
            vars(layer).pop("forward")
            if own is not None:
                vars(layer)["forward"] = own
        self._own.clear()

    def _note(self, number: int, *given: Any, **named: Any) -> Tensor:
        states = states_of((given, named))
        if number != len(self._calls) or (number and states is not states_of(self._calls[0])):
            raise NotAChainError
        self._calls.append((given, named))
        if not self.is_noted:
            return states
        self.end()
        return self._make(states)

    def _make(self, states: Tensor) -> Tensor:
        """Takes the parts through all layers, one after another."""
        me = self.relay.axis.index
        mine = [number for number, owner in enumerate(self.owners) if owner == me]
        calls, keys = self._cut(mine)
        for number, (given, named) in enumerate(self._calls):
            if number not in mine:  # what stands in its place counts the tokens in a cache
                self._forwards[number](*given, **named)
        try:
            parts = self.relay.through(range(len(calls)), lambda part: self._run(calls[part], keys, part))
        finally:
            keys.put_back()
        keys.join()
        return torch.cat(parts, 0 if self.row is None else 1) if mine[-1] == len(self.layers) - 1 else states

    def _run(self, calls: Sequence[LayerCall], keys: CutKeys, part: int) -> Tensor:
        """Runs this rank's layers on a part."""
        if self.row is not None:
            self.row.begin(part)
        keys.take(part)
        states = states_of(calls[0])
        for number, owner in enumerate(self.owners):
            (states,) = self.relay.enter(owner, (states,))
            if owner == self.relay.axis.index:
                given, named = with_states(calls[number], states)
                states = self._forwards[number](*given, **named)
        return states

    def _cut(self, mine: Sequence[int]) -> tuple[list[list[LayerCall]], CutKeys]:
        """Returns what each layer is given for each part, and the keys."""
        cache, total = cache_of(self._calls), self._total
        if self.row is not None:
            assert cache is None, "its texts have keys of their own"
            calls = [[cut_tokens(call, part, total) for call in self._calls] for part in self._parts]
            return calls, CutKeys(None, mine, len(self.layers), self._parts)
        try:
            cut = [
                [cut_rows(*each, part, total, cache) for each in zip(self.layers, self._calls, strict=True)]
                for part in self._parts
            ]
            return cut, CutKeys(cache, mine, len(self.layers), self._parts)
        except UnsupportedError as problem:
            self.whole = str(problem)
            return [self._calls], CutKeys(None, mine, len(self.layers), self._parts)
