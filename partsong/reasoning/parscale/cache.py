"""Caches keys and values for ParScale: each stream's learned prefix comes first, and positions do not count it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from partsong.errors import ArgumentError, UnsupportedError

__all__ = ["ParScaleCache", "PrefixLayer"]


class PrefixLayer(DynamicLayer):
    """Holds a layer's keys and values, `[streams * batch, kv_heads, prefix + tokens, head_dim]`, stream by stream.

    The prefix is copied in when the first token comes, since only then is the batch known. Its keys carry no rotary
    embedding and its length is not counted, so the first token is at position 0.

    Args:
        key: the prefix of each stream, `[streams, kv_heads, prefix, head_dim]`.
        value: of the same shape.
    """

    # The batch is unknown before the first token, and a batch that does not count streams would be wrong.
    supports_early_init = False

    def __init__(self, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self._prefix = (key, value)
        self.num_streams, self.prefix_length = key.shape[0], key.shape[2]
        #: Streams times batch in the current call; the hook of the attached model sets it.
        self.rows: int | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Copies the prefix in for a batch.

        Args:
            key_states: the keys of the first tokens, `[streams * batch, kv_heads, tokens, head_dim]`.
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
        """Counts the tokens seen, without the prefix."""
        if not self.is_initialized or self.keys is None:
            return 0
        return self.keys.shape[-2] - self.prefix_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Counts the keys that the next call's queries see, including the prefix, and returns the first one's index."""
        return self.prefix_length + self.get_seq_length() + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; the prefix stays.

        Args:
            tokens_to_remove: minus the number of tokens, or zero.

        Raises:
            ArgumentError: there are fewer tokens than that.
        """
        if -tokens_to_remove > self.get_seq_length():
            raise ArgumentError(f"crop({tokens_to_remove}): the cache holds {self.get_seq_length()} tokens")
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Gives every row of every stream the past of another row.

        Args:
            beam_idx: the row of the batch that each row continues, `[batch]`.
        """
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows of the batch, in every stream.

        Args:
            indices: which rows, as numbers or as a boolean for every row.
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
    """Serves one call, or one run of `generate`, with a given number of streams; `ParScale.cache` makes it.

    Args:
        keys: the prefix keys of every layer, each `[streams, kv_heads, prefix, head_dim]`; empty for the base model,
            which has one stream and no prefix.
        values: of the same shapes.
        num_layers: how many layers the model has.
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
        #: The first prefix, by which a model recognises its own caches.
        self.source: Tensor | None = keys[0] if keys else None
        #: Whether it serves a single call, whose caller asked for no cache.
        self.passing = False

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Returns the index of the next token among all keys, including the prefix, for masks."""
        return self.prefix_length + self.get_seq_length(layer_idx)

    def expect(self, rows: int) -> None:
        """Sets the number of rows, streams times batch, of the current call."""
        for layer in self.layers:
            if isinstance(layer, PrefixLayer):
                layer.rows = rows
