"""Keeps the keys and values of texts that grow at their end, in memory that is reserved ahead.

A new token is written after the others and a view of all is read, so a step joins and copies nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from partsong.samplers.text.key_store import join_first

__all__ = ["GrowingKeys"]


@dataclass(slots=True, eq=False)
class _Place:
    """Says where the tokens of a forward are written; all layers share it.

    Attributes:
        begin: the first slot of the forward's tokens, where it is the same for all rows.
        until: slots that are read.
        slots: int64 `[B, Q]`, where it differs from row to row.
    """

    begin: int = 0
    until: int = 0
    slots: Tensor | None = None


class _Layer(CacheLayerMixin):
    """Holds one layer: keys and values `[rows, kv_heads, slots, head_dim]`."""

    is_sliding = False

    def __init__(self, room: int, place: _Place) -> None:
        super().__init__()
        self.room, self.place = room, place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates memory for as many rows and heads as are written first."""
        # Zeros: an unwritten slot may be read with weight 0, and 0 * nan is nan.
        self.keys, self.values = (
            x.new_zeros(x.shape[0], x.shape[1], self.room, x.shape[3]) for x in (key_states, value_states)
        )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes `[B, H, Q, D]` to the store's slots; returns all keys and values up to there, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        place = self.place
        if place.slots is None:
            here = slice(place.begin, place.until)
            self.keys[:, :, here], self.values[:, :, here] = key_states, value_states
        else:
            rows = torch.arange(len(place.slots), device=place.slots.device)[:, None]
            self.keys[rows, :, place.slots] = key_states.transpose(1, 2)
            self.values[rows, :, place.slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : place.until], self.values[:, :, : place.until]

    def can_cut(self, total: int) -> bool:
        """Says whether it can be cut by the rows of a call."""
        return self.keys is None or len(self.keys) == total

    def some(self, rows: slice) -> _Layer:
        """Returns a layer like it for some rows of the call."""
        part, place = copy.copy(self), self.place
        part.place = _Place(place.begin, place.until, None if place.slots is None else place.slots[rows])
        if self.keys is not None and self.values is not None:
            part.keys, part.values = self.keys[rows], self.values[rows]
        return part

    def join(self, parts: Sequence[_Layer]) -> None:
        """Takes the keys of the parts of a call; those of memory that was there are written already."""
        join_first(self, parts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many keys come back, and where they begin."""
        return self.place.until, 0

    def get_seq_length(self) -> int:
        """Returns how many tokens come before those of this forward."""
        return self.place.begin

    def get_max_length(self) -> int:
        """Returns the slots of a row."""
        return self.room

    get_max_cache_shape = get_max_length  # what transformers before 5.13 calls it


class GrowingKeys(Cache):
    """Holds the keys and values of texts; a transformers attention module writes and reads it as it would any cache.

    Args:
        layers: attention layers of the model.
        room: slots of a row, each for a token; `reserve` makes more.

    >>> keys = GrowingKeys(layers=1, room=4)
    >>> keys.at(0, 2)
    >>> keys.update(torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8), 0)[0].shape
    torch.Size([1, 1, 2, 8])
    """

    layers: list[_Layer]

    def __init__(self, *, layers: int, room: int) -> None:
        self._place = _Place()
        super().__init__(layers=[_Layer(room, self._place) for _ in range(layers)])

    def at(self, begin: int, until: int, slots: Tensor | None = None) -> None:
        """Sets where the tokens of the next forward go.

        Args:
            begin: the first slot they take, in all rows.
            until: one after the last slot that is read.
            slots: int64 `[B, Q]`, the slot of each, where rows differ.
        """
        self._place.begin, self._place.until, self._place.slots = begin, until, slots

    def reserve(self, room: int) -> None:
        """Makes room for more slots, at least twice as many as there are if there are too few."""
        for layer in self.layers:
            if layer.room >= room:
                continue
            old, layer.room = layer.room, max(room, 2 * layer.room)
            if layer.keys is not None and layer.values is not None:
                both = (layer.keys, layer.values)
                layer.lazy_initialization(*both)
                layer.keys[:, :, :old], layer.values[:, :, :old] = both

    def gather(self, row: int, first: int, places: Sequence[int]) -> None:
        """Moves tokens of a row together, so that they follow each other from a slot on.

        Args:
            row: the row.
            first: the slot.
            places: where each of them is, counted from that slot, in rising order.
        """
        until = first + len(places)
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):
                assert isinstance(buffer, Tensor)
                come_from = torch.tensor(places, device=buffer.device) + first
                buffer[row, :, first:until] = buffer[row].index_select(1, come_from)

    def clear(self, row: int, first: int) -> None:
        """Empties the slots of a row from one on: hidden keys have weight 0 as well, and 0 * nan is nan."""
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):
                assert isinstance(buffer, Tensor)
                buffer[row, :, first:] = 0

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but these, int64 `[n]`, moved together in the given order."""
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = layer.keys.index_select(0, rows), layer.values.index_select(0, rows)
