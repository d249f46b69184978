"""Rounds numbers to few bits and reads them again, each in one or two Triton kernels.

Importing this needs triton. Arithmetic is float32. The specification of each format is in
`partsong.parallel.exchange.wires`.
"""

# Triton is optional where types are checked, and a kernel is called with other types than it computes with.
# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from partsong.kernels.norms_triton import variant

__all__ = ["VARIANTS", "read_few_bits", "read_rows", "round_few_bits", "round_rows", "token_and_channel_means"]

#: Elements of the tile that a program keeps.
TILE = 4096
#: Rows of a tile of tokens, and channels that it reads at a time.
TOKENS, CHANNELS = 32, 128
_TINY = torch.finfo(torch.float32).tiny


@triton.jit
def _nearest_bfloat16(x: tl.tensor) -> tl.tensor:
    """Rounds to the nearest number of bfloat16, halves to the even one; Triton's interpreter would cut bits off."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_rows_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    rows: tl.tensor,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rounds rows to 8 bits, the largest of each to the largest number."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    where = row[:, None].to(tl.int64) * WIDTH + column[None, :]
    x = tl.load(values + where, mask=inside, other=0.0).to(tl.float32)
    # A scale that is rounded down would push the largest value out of range.
    scale = _nearest_bfloat16(tl.max(tl.abs(x), axis=1) * (1.00390625 / MOST))
    tl.store(scales + row, scale.to(tl.bfloat16), mask=row < rows)
    x = x / tl.maximum(scale, TINY)[:, None]
    if WHOLE:  # adding and taking off 1.5 x 2**23 rounds to the nearest whole number, halves to the even one
        x = (x + 12582912.0) - 12582912.0
    x = tl.minimum(tl.maximum(x, -MOST), MOST)
    tl.store(codes + where, x.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def read_rows_kernel(
    scales: tl.tensor,
    codes: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Reads rows of 8 bits."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    where = row[:, None].to(tl.int64) * WIDTH + column[None, :]
    scale = tl.load(scales + row, mask=row < rows, other=0.0).to(tl.float32)
    x = tl.load(codes + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, x * scale[:, None], mask=inside)


@triton.jit
def means_kernel(
    values: tl.tensor,
    by_token: tl.tensor,
    by_part: tl.tensor,
    tokens: tl.tensor,
    rest: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Means the sizes of each token's numbers, and adds up those of each channel over a tile of tokens."""
    part, matrix = tl.program_id(0), tl.program_id(1)
    token = part * BLOCK_T + tl.arange(0, BLOCK_T)
    start = (token.to(tl.int64) * rest + matrix) * WIDTH
    total = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, WIDTH, BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)
        inside = (token < tokens)[:, None] & (column < WIDTH)[None, :]
        x = tl.abs(tl.load(values + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32))
        total += tl.sum(x, axis=1)
        place = (part.to(tl.int64) * rest + matrix) * WIDTH + column
        tl.store(by_part + place, tl.sum(x, axis=0), mask=column < WIDTH)
    tl.store(by_token + token * rest + matrix, total / WIDTH, mask=token < tokens)


@triton.jit
def round_few_bits_kernel(
    values: tl.tensor,
    by_token: tl.tensor,
    by_channel: tl.tensor,
    packed: tl.tensor,
    tokens: tl.tensor,
    rest: tl.tensor,
    DISTANCE: tl.constexpr,
    TINY: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Writes the number of each residual's nearest level, the channels of a byte from its low bits on."""
    PER: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = (WIDTH + PER - 1) // PER
    token, matrix = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(2)
    byte = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    row = token.to(tl.int64) * rest + matrix
    result = tl.zeros([BLOCK_T, BLOCK_B], tl.int32)
    for place in tl.static_range(PER):
        column = byte * PER + place
        inside = (token < tokens)[:, None] & (column < WIDTH)[None, :]
        x = tl.load(values + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if BITS == 1:
            code = (x >= 0.0).to(tl.int32)
        else:
            scale = tl.load(by_token + row, mask=token < tokens, other=1.0).to(tl.float32)
            step = tl.load(by_channel + matrix * WIDTH + column, mask=column < WIDTH, other=1.0).to(tl.float32)
            x = x / tl.maximum(scale, TINY)[:, None] / tl.maximum(step * DISTANCE, TINY)[None, :]
            code = tl.minimum(tl.maximum(x + (1 << BITS) / 2, 0.0), (1 << BITS) - 1.0).to(tl.int32)
        result += tl.where(inside, code, 0) << (place * BITS)
    inside = (token < tokens)[:, None] & (byte < BYTES)[None, :]
    tl.store(packed + row[:, None] * BYTES + byte[None, :], result.to(tl.uint8), mask=inside)


@triton.jit
def read_few_bits_kernel(
    packed: tl.tensor,
    by_token: tl.tensor,
    by_channel: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    rest: tl.tensor,
    DISTANCE: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Reads residuals of few bits."""
    PER: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = (WIDTH + PER - 1) // PER
    token, matrix = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(2)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = token.to(tl.int64) * rest + matrix
    inside = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    byte = tl.load(packed + row[:, None] * BYTES + (column // PER)[None, :], mask=inside, other=0).to(tl.int32)
    code = (byte >> ((column % PER) * BITS)[None, :]) & ((1 << BITS) - 1)
    scale = tl.load(by_token + row, mask=token < tokens, other=0.0).to(tl.float32)
    step = tl.load(by_channel + matrix * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32) * DISTANCE
    level = code.to(tl.float32) - ((1 << BITS) - 1) / 2
    tl.store(out + row[:, None] * WIDTH + column[None, :], level * scale[:, None] * step[None, :], mask=inside)


def round_rows(values: Tensor, scales: Tensor, codes: Tensor, most: float) -> None:
    """Rounds contiguous rows `[R, D]` to `codes` of 8 bits, and writes the scale `[R]` of each."""
    grid, tile = _rows_of(values)
    with torch.cuda.device_of(values):
        round_rows_kernel[grid](
            values, scales, codes, len(values), MOST=most, TINY=_TINY, WHOLE=codes.dtype == torch.int8, **tile
        )


def read_rows(scales: Tensor, codes: Tensor) -> Tensor:
    """Returns rows `[R, D]` in float32 from their codes and the scale of each."""
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    grid, tile = _rows_of(codes)
    with torch.cuda.device_of(codes):
        read_rows_kernel[grid](scales, codes, out, len(codes), **tile)
    return out


def _rows_of(values: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Returns how many tiles `[R, D]` is cut into, and their sizes."""
    rows, width = values.shape
    block_d = triton.next_power_of_2(width)
    block_r = max(TILE // block_d, 1)
    return (triton.cdiv(rows, block_r),), {"WIDTH": width, "BLOCK_R": block_r, "BLOCK_D": block_d}


def token_and_channel_means(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean sizes `[T, rest]` of contiguous values `[T, rest, C]` by token, and the sums `[rest, C]`."""
    tokens, rest, width = values.shape
    parts = triton.cdiv(tokens, TOKENS)
    by_token = torch.empty(tokens, rest, dtype=torch.float32, device=values.device)
    by_part = torch.empty(parts, rest, width, dtype=torch.float32, device=values.device)
    with torch.cuda.device_of(values):
        means_kernel[(parts, rest)](
            values, by_token, by_part, tokens, rest, WIDTH=width, BLOCK_T=TOKENS, BLOCK_C=CHANNELS
        )
    return by_token, by_part.sum(0)


def round_few_bits(
    values: Tensor, by_token: Tensor, by_channel: Tensor, packed: Tensor, bits: int, distance: float
) -> None:
    """Packs the levels of contiguous residuals `[T, rest, C]` into bytes `[T, rest, C * bits / 8]`, rounded up."""
    tokens, rest, width = values.shape
    grid = (triton.cdiv(tokens, TOKENS), triton.cdiv(packed.shape[2], CHANNELS), rest)
    with torch.cuda.device_of(values):
        round_few_bits_kernel[grid](
            values, by_token, by_channel, packed, tokens, rest,
            DISTANCE=distance, TINY=_TINY, BITS=bits, WIDTH=width, BLOCK_T=TOKENS, BLOCK_B=CHANNELS,
        )  # fmt: skip


def read_few_bits(
    packed: Tensor, by_token: Tensor, by_channel: Tensor, width: int, bits: int, distance: float
) -> Tensor:
    """Returns residuals `[T, rest, C]` in float32 from their packed levels and scales."""
    tokens, rest, _ = packed.shape
    out = torch.empty(tokens, rest, width, dtype=torch.float32, device=packed.device)
    with torch.cuda.device_of(packed):
        read_few_bits_kernel[(triton.cdiv(tokens, TOKENS), triton.cdiv(width, CHANNELS), rest)](
            packed, by_token, by_channel, out, tokens, rest,
            DISTANCE=distance, BITS=bits, WIDTH=width, BLOCK_T=TOKENS, BLOCK_C=CHANNELS,
        )  # fmt: skip
    return out


def _variants() -> list[dict[str, Any]]:
    rows = {"WIDTH": 128, "BLOCK_R": TILE // 128, "BLOCK_D": 128}
    round_to = {**rows, "MOST": 127.0, "TINY": _TINY, "WHOLE": True}
    tiles = {"WIDTH": 3072, "BLOCK_T": TOKENS}
    scales = {"*bf16": "values by_token by_channel", "*u8": "packed", "*fp32": "out"}
    few = {**tiles, "BITS": 2, "DISTANCE": 1.248}
    return [
        variant("rows to int8", round_rows_kernel, round_to, {"*bf16": "values scales", "*i8": "codes"}, 4),
        variant("rows of int8", read_rows_kernel, rows, {"*bf16": "scales", "*i8": "codes", "*fp32": "out"}, 4),
        variant("means of sizes", means_kernel, {**tiles, "BLOCK_C": CHANNELS},
                {"*bf16": "values", "*fp32": "by_token by_part"}, 4),
        variant("to 2 bits", round_few_bits_kernel, {**few, "TINY": _TINY, "BLOCK_B": CHANNELS}, scales, 4),
        variant("of 2 bits", read_few_bits_kernel, {**few, "BLOCK_C": CHANNELS}, scales, 4),
    ]  # fmt: skip


#: The forms of these kernels that matter: rows of a head, and channels of a whole layer.
VARIANTS = _variants()
