"""Chooses tile sizes for the token head's Triton kernel, without importing Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Tiles", "tiles_for"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Holds tile sizes of `scan_kernel`, powers of two.

    Attributes:
        rows: rows of a program.
        tokens: vocabulary entries worked on at once, a multiple of `GROUP`.
        width: hidden columns per step of the product.
        noise: vocabulary entries whose noise is made at once, a multiple of `GROUP`; what registers allow.
        num_warps: warps of a program.
        num_stages: steps of the product whose loads are in flight.
    """

    rows: int
    tokens: int
    width: int
    noise: int
    num_warps: int
    num_stages: int


def tiles_for(num_rows: int, dtype: torch.dtype, *, drawn: bool, capability: int) -> Tiles:
    """Returns the largest tiles that compile without spilling registers.

    Few rows wait for the weights to arrive, many for the tensor cores, and noise takes registers: only Hopper's tiles
    leave enough of them for 128 rows x 128 tokens and noise, and those of capability 12 for 64 rows only.

    Args:
        num_rows: N.
        dtype: that of the inputs.
        drawn: whether noise is added.
        capability: compute capability of the device, major number.
    """
    if dtype is torch.float32:
        rows = 16 if num_rows <= 16 else 32 if drawn and capability == 12 else 64
        return Tiles(rows=rows, tokens=64, width=32, noise=64, num_warps=4, num_stages=3)
    if num_rows <= 16:
        return Tiles(rows=16, tokens=128, width=64, noise=128, num_warps=4, num_stages=4)
    if num_rows <= 32:
        return Tiles(rows=32, tokens=128, width=64, noise=128, num_warps=8, num_stages=4)
    if num_rows <= 64 or (drawn and capability == 12):
        return Tiles(rows=64, tokens=128, width=64, noise=64, num_warps=8, num_stages=4)
    tokens = 64 if drawn and capability != 9 else 128
    return Tiles(rows=128, tokens=tokens, width=64, noise=32, num_warps=8, num_stages=3)
