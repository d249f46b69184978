"""The key/value cache of ParScale: every stream's learned prefix in front, positions that do not count it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from partsong.errors import ArgumentError, UnsupportedError

__all__ = ["ParScaleCache", "PrefixLayer"]


class PrefixLayer(DynamicLayer):
    """One layer's keys and values, `[streams * batch, kv_heads, prefix + tokens, head_dim]`, stream by stream.

    The prefix is laid down when the first token comes, since only then is the batch known. Its keys carry no rotary
    embedding and its length is not counted, so the first token is at position 0.

    Args:
        key: the prefix of every stream, `[streams, kv_heads, prefix, head_dim]`.
        value: of the same shape.
    """

    # Nothing is known of the batch before the first token, and a batch that counts no streams would be wrong.
    supports_early_init = False

    def __init__(self, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self._prefix = (key, value)
        self.num_streams, self.prefix_length = key.shape[0], key.shape[2]
        #: Streams times batch of the call under way, set by the hook of the attached model.
        self.rows: int | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Lays the prefix down for a batch.

        Args:
            key_states: of the first tokens, `[streams * batch, kv_heads, tokens, head_dim]`.
            value_states: of the same shape.

        Raises:
            UnsupportedError: the model that calls has no ParScale attached.
        """
        if self.rows != key_states.shape[0]:
            raise UnsupportedError(
                f"a cache of {self.num_streams} streams got keys of {key_states.shape[0]} rows, expected "
                f"{self.rows or 'a call of the model it was made for'}: the model has no ParScale attached now"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        batch = key_states.shape[0] // self.num_streams
        self.keys, self.values = (
            part.to(device=self.device, dtype=self.dtype).repeat_interleave(batch, dim=0) for part in self._prefix
        )
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Tokens seen, the prefix not counted."""
        if not self.is_initialized or self.keys is None:
            return 0
        return self.keys.shape[-2] - self.prefix_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that queries of the next call will meet, the prefix among them, and the index of the first."""
        return self.prefix_length + self.get_seq_length() + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; the prefix stays.

        Args:
            tokens_to_remove: zero, or minus their number.

        Raises:
            ArgumentError: more tokens than there are.
        """
        if -tokens_to_remove > self.get_seq_length():
            raise ArgumentError(f"crop({tokens_to_remove}): the cache holds {self.get_seq_length()} tokens")
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Gives every row of every stream the past of another one.

        Args:
            beam_idx: which row of the batch each row goes on from, `[batch]`.
        """
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows of the batch, in every stream.

        Args:
            indices: which, as numbers or as a boolean for every row.
        """
        if not self.is_initialized or self.keys is None or self.values is None:
            return
        batch = self.keys.shape[0] // self.num_streams
        chosen = indices.to(self.keys.device)
        if chosen.dtype == torch.bool:
            chosen = chosen.nonzero().squeeze(-1)
        rows = torch.cat([chosen + batch * stream for stream in range(self.num_streams)])
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)


class ParScaleCache(Cache):
    """A cache for one call, or one run of `generate`, with a given number of streams; `ParScale.cache` makes it.

    Args:
        keys: the prefix keys of every layer, each `[streams, kv_heads, prefix, head_dim]`; none for one stream,
            which has no prefix and is the base model.
        values: of the same shapes.
        num_layers: layers of the model.
    """

    layers: list[DynamicLayer]  # type: ignore[assignment]

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], num_layers: int) -> None:
        if keys:
            layers: list[DynamicLayer] = [PrefixLayer(key, value) for key, value in zip(keys, values, strict=True)]
        else:
            layers = [DynamicLayer() for _ in range(num_layers)]
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.num_streams: int = keys[0].shape[0] if keys else 1
        self.prefix_length: int = keys[0].shape[2] if keys else 0
        #: By which a model knows its own caches.
        self.source: Tensor | None = keys[0] if keys else None
        #: Whether it serves one call only, whose caller asked for no cache.
        self.passing = False

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Index of the next token among all keys, the prefix counted: what masks are made with."""
        return self.prefix_length + self.get_seq_length(layer_idx)

    def expect(self, rows: int) -> None:
        """Says how many rows, streams times batch, the call under way has."""
        for layer in self.layers:
            if isinstance(layer, PrefixLayer):
                layer.rows = rows
