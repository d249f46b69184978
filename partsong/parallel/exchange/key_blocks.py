"""Keys and values in one piece of memory, tokens first, so that blocks of several ranks can lie end to end."""

from __future__ import annotations

from torch import Tensor

__all__ = ["pack_keys_values", "unpack_keys_values", "write_keys_values"]


def pack_keys_values(k: Tensor, v: Tensor) -> Tensor:
    """`[L, B, 2, H, D]` in one piece of memory, tokens first, so blocks of several ranks can lie end to end."""
    batch, heads, length, dim = k.shape
    block = k.new_empty((length, batch, 2, heads, dim))
    write_keys_values(block, k, v)
    return block


def write_keys_values(block: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes keys and values `[B, H, L, D]` into a block `[L, B, 2, H, D]`."""
    block[:, :, 0] = k.permute(2, 0, 1, 3)
    block[:, :, 1] = v.permute(2, 0, 1, 3)


def unpack_keys_values(block: Tensor) -> tuple[Tensor, Tensor]:
    """Views `[B, H, L, D]` of the keys and values in a block."""
    k, v = block.permute(2, 1, 3, 0, 4)
    return k, v
