"""Packs keys and values into one piece of memory, tokens first, so that blocks of several ranks can lie end to end."""

from __future__ import annotations

from torch import Tensor

__all__ = ["empty_block", "unpack_keys_values", "write_keys_values"]


def empty_block(like: Tensor, tokens: int) -> Tensor:
    """Allocates `[tokens, B, 2, H, D]` for keys and values like keys `[B, H, L, D]`."""
    batch, heads, _, dim = like.shape
    return like.new_empty((tokens, batch, 2, heads, dim))


def write_keys_values(block: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes keys and values `[B, H, L, D]` into a block `[L, B, 2, H, D]`."""
    block[:, :, 0] = k.permute(2, 0, 1, 3)
    block[:, :, 1] = v.permute(2, 0, 1, 3)


def unpack_keys_values(block: Tensor) -> tuple[Tensor, Tensor]:
    """Returns views `[B, H, L, D]` of the keys and values in a block."""
    k, v = block.permute(2, 1, 3, 0, 4)
    return k, v
