"""Keeps keys and values of the answers being written, a slot per token in memory that is reserved ahead."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["AnswerStore"]

#: Slots of a row to begin with; they double when an answer outgrows them.
_SLOTS = 64


class AnswerStore:
    """Holds keys and values `[layers, rows, kv_heads, slots, head_dim]`, with rows packed from 0 on.

    Growing copies the contents, which is rare, since the size doubles. Writing a token copies nothing else.

    Args:
        shape: (layers, kv_heads, head_dim).
        dtype: of keys and values.
        device: where they are.

    >>> store = AnswerStore((1, 1, 2), torch.float32, torch.device("cpu"))
    >>> store.reserve(3, 70)
    >>> tuple(store.keys.shape)
    (1, 4, 1, 128, 2)
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self.keys, self.values = self._room(0, _SLOTS)

    def _room(self, rows: int, slots: int) -> tuple[Tensor, Tensor]:
        layers, heads, width = self._shape
        # Zeros: unwritten slots are read with weight 0, and 0 * nan is nan.
        both = torch.zeros(2, layers, rows, heads, slots, width, dtype=self._dtype, device=self._device)
        return both[0], both[1]

    def some(self, rows: slice) -> AnswerStore:
        """Returns the store of some rows, which has their memory in common with this one until that grows."""
        part = copy.copy(self)
        part.keys, part.values = self.keys[:, rows], self.values[:, rows]
        return part

    def reserve(self, rows: int, slots: int) -> None:
        """Makes room for `rows` rows of `slots` tokens."""
        have_rows, have_slots = self.keys.shape[1], self.keys.shape[3]
        if rows <= have_rows and slots <= have_slots:
            return
        while have_rows < rows:
            have_rows = max(1, 2 * have_rows)
        while have_slots < slots:
            have_slots *= 2
        before = (self.keys, self.values)
        self.keys, self.values = self._room(have_rows, have_slots)
        for new, old in zip((self.keys, self.values), before, strict=True):
            new[:, : old.shape[1], :, : old.shape[3]] = old

    def write(self, row: int, first: int, keys: Tensor, values: Tensor) -> None:
        """Writes tokens `[layers, kv_heads, tokens, head_dim]` into a row, beginning at a slot."""
        where = slice(first, first + keys.shape[2])
        self.keys[:, row, :, where], self.values[:, row, :, where] = keys, values

    def gather(self, row: int, first: int, places: Sequence[int]) -> None:
        """Moves tokens of a row together, so that they follow each other from a slot on.

        Args:
            row: the row.
            first: the slot.
            places: where each of them is, counted from that slot, in rising order.
        """
        come_from = torch.tensor(places, device=self.keys.device) + first
        where = slice(first, first + len(places))
        for store in (self.keys, self.values):
            store[:, row, :, where] = store[:, row].index_select(2, come_from)

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first tokens of a row over those of another row."""
        for store in (self.keys, self.values):
            store[:, target, :, :length] = store[:, source, :, :length]

    def clear(self, row: int, first: int) -> None:
        """Writes zeros into the slots of a row, beginning at one."""
        for store in (self.keys, self.values):
            store[:, row, :, first:] = 0

    def release(self) -> None:
        """Frees the memory once there are no rows."""
        self.keys, self.values = self._room(0, _SLOTS)
