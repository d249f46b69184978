"""Keeps the keys and values of a batch in fixed slots, which are written in any order and read as a whole.

A causal cache only grows at its end. A text that is decoded in any order writes anywhere, repeatedly, and each row at
its own pace; so every position owns a slot, and each forward names the slots that its tokens write.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.knobs import Count, check_knobs, type_hints

__all__ = ["SlotKeyStore", "SlotLayer", "join_first"]


def join_first(layer: CacheLayerMixin, parts: Sequence[CacheLayerMixin]) -> None:
    """Puts the first keys that a layer gets together, where its parts have allocated memory for their rows."""
    if not layer.is_initialized and parts[-1].is_initialized:
        layer.keys, layer.values = (torch.cat([getattr(part, name) for part in parts]) for name in ("keys", "values"))
        vars(layer).update({name: getattr(parts[-1], name) for name in ("dtype", "device", "is_initialized")})


class SlotLayer(CacheLayerMixin):
    """Holds one layer of a `SlotKeyStore`: keys `[rows, kv_heads, slots + 1, head_dim]`, and values of the same shape.

    Attributes:
        rows: rows held.
        slots: positions of a row; slot number `slots` is scratch, written and never read.
    """

    is_sliding = False

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__()
        self.rows, self.slots = rows, slots
        self._written: Tensor | None = None
        self._taken: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the buffers; heads, width, dtype and device are those of the first write."""
        # Zeros, not empty: an unwritten slot has weight 0 in the attention, and 0 * nan is nan.
        self.keys, self.values = (
            x.new_zeros(self.rows, x.shape[1], self.slots + 1, x.shape[3]) for x in (key_states, value_states)
        )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def at(self, slots: Tensor, rows: Tensor | None) -> None:
        """Sets where the next `update` writes, and which rows it returns."""
        self._written, self._taken = slots, rows

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes `[B, H, Q, D]` to the slots that `at` set; returns the rows' keys and values `[B, H, slots, D]`.

        With all rows taking part these are views of the buffers; a selection of rows is a copy of those rows.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self._written is not None and self.keys is not None and self.values is not None
        index = torch.arange(self.rows, device=self._written.device) if self._taken is None else self._taken
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            buffer[index[:, None], :, self._written] = new.transpose(1, 2)
        return self.read(self._taken)

    def read(self, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns keys and values `[B, H, slots, D]` of some rows (a copy), or of all (None, views)."""
        assert self.keys is not None and self.values is not None
        keys, values = self.keys[:, :, : self.slots], self.values[:, :, : self.slots]
        return (keys, values) if rows is None else (keys.index_select(0, rows), values.index_select(0, rows))

    def can_cut(self, total: int) -> bool:
        """Says whether it can be cut by the rows of a call: selected rows are written where there is memory already."""
        return self.is_initialized or self._taken is None

    def some(self, rows: slice) -> SlotLayer:
        """Returns a layer like it for some rows of the call."""
        part = copy.copy(self)
        assert self._written is not None
        part._written = self._written[rows]
        if self._taken is not None:
            part._taken = self._taken[rows]
            return part
        part.rows = len(part._written)
        if self.keys is not None and self.values is not None:
            part.keys, part.values = self.keys[rows], self.values[rows]
        return part

    def join(self, parts: Sequence[SlotLayer]) -> None:
        """Takes the keys of the parts of a call; those of memory that was there are written already."""
        join_first(self, parts)

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but these."""
        self.rows = len(rows)
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.index_select(0, rows)
            self.values = self.values.index_select(0, rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many keys come back, and where they begin."""
        return self.slots, 0

    def get_seq_length(self) -> int:
        """Returns the slots of a row. Positions are always given explicitly, so nothing is counted from this."""
        return self.slots

    def get_max_length(self) -> int:
        """Returns the slots of a row."""
        return self.slots

    get_max_cache_shape = get_max_length  # what transformers before 5.13 calls it


class SlotKeyStore(Cache):
    """Holds the keys and values of `rows` texts of `slots` positions, with one scratch slot more.

    Memory: ``2 * layers * rows * kv_heads * (slots + 1) * head_dim`` elements, allocated layer by layer in the first
    forward. A transformers attention module writes and reads it through `Cache.update`, as it would any cache.

    Args:
        layers: attention layers of the model.
        rows: texts.
        slots: positions of each.

    Attributes:
        rows: texts held now; `keep` lowers it.
        slots: positions of each.

    Raises:
        ArgumentError: a count below 1, or slots or rows that do not fit the store.
        ArgumentTypeError: indices that are not int64 tensors.

    >>> store = SlotKeyStore(layers=1, rows=2, slots=4)
    >>> store.at(torch.tensor([[0], [3]]), None)
    >>> keys, values = store.update(torch.ones(2, 1, 1, 8), torch.ones(2, 1, 1, 8), 0)
    >>> keys[:, 0, :, 0].tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    """

    layers: list[SlotLayer]

    def __init__(self, *, layers: Count, rows: Count, slots: Count) -> None:
        sizes = {"layers": layers, "rows": rows, "slots": slots}
        check_knobs(type_hints(SlotKeyStore.__init__), sizes, owner="SlotKeyStore: ")
        super().__init__(layers=[SlotLayer(rows, slots) for _ in range(layers)])
        self.rows, self.slots = rows, slots

    def at(self, slots: Tensor, rows: Tensor | None) -> None:
        """Sets where every layer of the next forward writes.

        Args:
            slots: int64 `[B, Q]`; `self.slots` is the scratch slot, which several tokens may write.
            rows: int64 `[B]`, distinct; None is all of them in order, and returns views instead of copies.
        """
        for name, index, dims in (("slots", slots, 2), ("rows", rows, 1)):
            if index is None:
                continue
            if not isinstance(index, Tensor) or index.dtype is not torch.int64 or index.dim() != dims:
                given = f"{index.dtype} {tuple(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
                raise ArgumentTypeError(f"a key store needs {name} as int64 with {dims} dims, found {given}")
        taking_part = self.rows if rows is None else len(rows)
        if len(slots) != taking_part:
            raise ArgumentError(
                f"slots are given for {len(slots)} rows and {taking_part} take part; "
                f"the store holds {self.rows}: give as many slots as rows, and name the rows if these are not all"
            )
        for layer in self.layers:
            layer.at(slots, rows)

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but these, int64 `[n]`, which move together in the order given."""
        if rows.dtype is not torch.int64 or rows.dim() != 1:
            raise ArgumentTypeError(f"keep() needs int64 [n], found {rows.dtype} {tuple(rows.shape)}")
        self.rows = len(rows)
        for layer in self.layers:
            layer.keep(rows)
