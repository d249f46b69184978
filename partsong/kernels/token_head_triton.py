"""Computes the token head in two Triton kernels. Import this file only where triton is.

`scan_kernel` multiplies a tile of rows with tile after tile of its split of the vocabulary on the tensor cores and
folds each tile of logits, still in registers, into the sums of `TokenState`. `combine_kernel` merges the splits. The
specification is `token_head_naive`; names of sums are those of `TokenState`, names in capitals are compile-time.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from partsong.kernels.no_token import FLOOR
from partsong.kernels.token_head_tiles import Tiles, tiles_for
from partsong.kernels.token_noise import GROUP, LANES, STREAM

__all__ = ["COMBINED", "VARIANTS", "combine_kernel", "options_for", "scan_kernel"]

_GROUP = tl.constexpr(GROUP)
_LANES = tl.constexpr(LANES)
_STREAM = tl.constexpr(STREAM)
_FLOOR = tl.constexpr(FLOOR)
_NONE = tl.constexpr(float("-inf"))
_NO_TOKEN = tl.constexpr(2**31 - 1)

#: Elements of a tile of `combine_kernel`: all splits of a few rows.
COMBINED = 2048


@triton.jit
def _products(
    hidden,
    weight,
    rows,
    tokens,
    width,
    hidden_step,
    weight_step,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Multiplies hidden and weight rows, float32 `[ROWS, TOKENS]`; rows and tokens are offsets of 32 bits."""
    columns = tl.arange(0, WIDTH)
    a_offsets = rows[:, None] + (columns * hidden_step)[None, :]
    b_offsets = tokens[None, :] + (columns * weight_step)[:, None]
    x = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, width, WIDTH):
        if EVEN:
            a, b = tl.load(hidden + a_offsets), tl.load(weight + b_offsets)
        else:
            inside = start + columns < width
            a = tl.load(hidden + a_offsets, mask=inside[None, :], other=0.0)
            b = tl.load(weight + b_offsets, mask=inside[:, None], other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        x = tl.dot(a, b, x, input_precision=PRECISION)
        hidden += WIDTH * hidden_step
        weight += WIDTH * weight_step
    return x


@triton.jit
def _tanh(x):
    # The exponent is never positive, so nothing overflows.
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _gumbel(key, position, groups, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Draws Gumbel noise `[ROWS, TOKENS]` for these groups of tokens; counter for counter that of the naive version."""
    counter = groups[None, :, None] * _LANES + tl.arange(0, _LANES)[None, None, :]
    low = (position & 0xFFFFFFFF).to(tl.uint32)[:, None, None]
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)[:, None, None]
    a, b, c, d = tl.philox(key[:, None, None], counter.to(tl.uint32), low, high, _STREAM)
    # Joined dims come last and in the order of their bits: [ROWS, groups, LANES, 2, 2] -> [ROWS, groups, 4, LANES].
    words = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 1, 3, 4, 2))
    bits = tl.reshape(words, (ROWS, TOKENS))
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    half = v / (2.0 - v)
    square = half * half
    series = 2.0 * half * (1.0 + square * (1.0 / 3.0 + square * (1.0 / 5.0 + square * (1.0 / 7.0))))
    return -tl.log(tl.where(v < 0.25, series, -tl.log(u)))


@triton.jit
def _fold(x, first, top, total, slope, argmax, second, TOKENS: tl.constexpr):
    """Updates the running sums by one more tile of logits, whose first column is token `first`."""
    largest, where = tl.max(x, 1, return_indices=True)
    others = tl.where(tl.arange(0, TOKENS)[None, :] == where[:, None], _NONE, x)
    second = tl.maximum(tl.maximum(second, tl.minimum(top, largest)), tl.max(others, 1))
    argmax = tl.where(largest > top, first + where, argmax)
    highest = tl.maximum(top, largest)
    shift = top - highest
    shifted = x - highest[:, None]
    weights = tl.exp(shifted)
    decay = tl.exp(shift)
    slope = decay * (slope + shift * total) + tl.sum(weights * tl.maximum(shifted, _FLOOR), 1)
    total = decay * total + tl.sum(weights, 1)
    return highest, total, slope, argmax, second


@triton.jit
def _fold_draw(
    x,
    inverse_temperature,
    key,
    position,
    group,
    score,
    token,
    token_logit,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    NOISE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Updates the best draw by logits `[ROWS, TOKENS]` of the groups group, group + STEP, group + 2 STEP ...

    The noise of a whole tile would not fit into the registers, so the tile is halved until NOISE tokens are left. It
    is split into even and odd groups, because its left and right halves may belong to different warps.
    """
    if TOKENS > NOISE:
        pairs = tl.reshape(x, (ROWS, TOKENS // _GROUP // 2, 2, _GROUP))
        even, odd = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        even, odd = tl.reshape(even, (ROWS, TOKENS // 2)), tl.reshape(odd, (ROWS, TOKENS // 2))
        HALF: tl.constexpr = TOKENS // 2
        score, token, token_logit = _fold_draw(
            even, inverse_temperature, key, position, group, score, token, token_logit, ROWS, HALF, NOISE, 2 * STEP
        )
        group += STEP
        score, token, token_logit = _fold_draw(
            odd, inverse_temperature, key, position, group, score, token, token_logit, ROWS, HALF, NOISE, 2 * STEP
        )
    else:
        groups = group + STEP * tl.arange(0, TOKENS // _GROUP)
        scores = x * inverse_temperature + _gumbel(key, position, groups, ROWS, TOKENS)
        best, where = tl.max(scores, 1, return_indices=True)
        logit = tl.max(tl.where(tl.arange(0, TOKENS)[None, :] == where[:, None], x, _NONE), 1)
        candidate = (group + where // _GROUP * STEP) * _GROUP + where % _GROUP
        better = (best > score) | ((best == score) & (best > _NONE) & (candidate < token))
        score = tl.where(better, best, score)
        token = tl.where(better, candidate, token)
        token_logit = tl.where(better, logit, token_logit)
    return score, token, token_logit


@triton.jit(do_not_specialize=["num_rows", "first_token", "tiles_per_split"])
def scan_kernel(
    hidden,
    weight,
    bias,
    keys,
    positions,
    floats,
    ints,
    num_rows,
    num_tokens,
    width,
    hidden_stride,
    hidden_step,
    weight_stride,
    weight_step,
    first_token,
    tiles_per_split,
    softcap,
    scale,
    inverse_temperature,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    NOISE: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Sums one tile of rows (program 0) over one split of the vocabulary (program 1).

    bias, keys with positions and inverse_temperature, and softcap may be None. floats is `[4 or 6, splits, N]`, ints
    `[1 or 2, splits, N]`: the larger ones with a draw. A tile begins where a group of the noise does, so the first one
    has up to GROUP - 1 columns that precede weight's first row.
    """
    first_row = tl.program_id(0) * ROWS
    # Rows and tokens past the end are read from the last one and dropped: the inner loop needs no masks for them.
    row = tl.minimum(tl.arange(0, ROWS), num_rows - 1 - first_row)
    hidden += first_row.to(tl.int64) * hidden_stride
    lead = first_token % _GROUP
    first_tile = tl.program_id(1) * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tl.cdiv(lead + num_tokens, TOKENS))
    top = tl.full([ROWS], _FLOOR, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    slope = tl.zeros([ROWS], tl.float32)
    second = tl.full([ROWS], _NONE, tl.float32)
    argmax = tl.zeros([ROWS], tl.int32) + first_token + tl.maximum(first_tile * TOKENS - lead, 0)
    if keys is not None:
        key, position = tl.load(keys + first_row + row), tl.load(positions + first_row + row)
        score, token_logit, token = second, second, argmax
    for tile in range(first_tile, last_tile):
        first = tile * TOKENS - lead
        column = tl.arange(0, TOKENS)
        read = tl.minimum(tl.maximum(column, -first), num_tokens - 1 - first)
        x = _products(
            hidden,
            weight + first.to(tl.int64) * weight_stride,
            row * hidden_stride,
            read * weight_stride,
            width,
            hidden_step,
            weight_step,
            ROWS,
            TOKENS,
            WIDTH,
            EVEN,
            PRECISION,
            UPCAST,
        )
        if softcap is not None:
            x = softcap * _tanh(x / softcap)
        if bias is not None:
            x += tl.load(bias + first + read).to(tl.float32)[None, :]
        x = tl.where((read == column)[None, :], x * scale, _NONE)
        top, total, slope, argmax, second = _fold(x, first_token + first, top, total, slope, argmax, second, TOKENS)
        if keys is not None:
            group = (first_token + first) // _GROUP
            score, token, token_logit = _fold_draw(
                x, inverse_temperature, key, position, group, score, token, token_logit, ROWS, TOKENS, NOISE, 1
            )
    at = tl.program_id(1) * num_rows + first_row + tl.arange(0, ROWS)
    plane = tl.num_programs(1) * num_rows
    here = first_row + tl.arange(0, ROWS) < num_rows
    tl.store(floats + at, top, mask=here)
    tl.store(floats + at + plane, total, mask=here)
    tl.store(floats + at + 2 * plane, slope, mask=here)
    tl.store(floats + at + 3 * plane, second, mask=here)
    tl.store(ints + at, argmax, mask=here)
    if keys is not None:
        tl.store(floats + at + 4 * plane, token_logit, mask=here)
        tl.store(floats + at + 5 * plane, score, mask=here)
        tl.store(ints + at + plane, token, mask=here)


@triton.jit(do_not_specialize=["num_splits", "num_rows"])
def combine_kernel(
    floats,
    ints,
    whole_floats,
    whole_ints,
    num_splits,
    num_rows,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    DRAWN: tl.constexpr,
):
    """Merges what `scan_kernel` left: all splits at once for ROWS rows; whole_floats `[4 or 6, N]`, whole_ints too."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    splits = tl.arange(0, SPLITS)
    at = splits[:, None] * num_rows + rows[None, :]
    plane = num_splits * num_rows
    here = rows < num_rows
    there = (splits < num_splits)[:, None] & here[None, :]
    tops = tl.load(floats + at, mask=there, other=_FLOOR)
    totals = tl.load(floats + at + plane, mask=there, other=0.0)
    slopes = tl.load(floats + at + 2 * plane, mask=there, other=0.0)
    seconds = tl.load(floats + at + 3 * plane, mask=there, other=_NONE)
    tokens = tl.load(ints + at, mask=there, other=_NO_TOKEN)
    top = tl.max(tops, 0)
    argmax = tl.min(tl.where(tops == top[None, :], tokens, _NO_TOKEN), 0)
    second = tl.max(tl.where(tokens == argmax[None, :], seconds, tops), 0)
    shift = tops - top[None, :]
    decay = tl.exp(shift)
    totals = decay * totals
    tl.store(whole_floats + rows, top, mask=here)
    tl.store(whole_floats + rows + num_rows, tl.sum(totals, 0), mask=here)
    tl.store(whole_floats + rows + 2 * num_rows, tl.sum(decay * slopes + shift * totals, 0), mask=here)
    tl.store(whole_floats + rows + 3 * num_rows, second, mask=here)
    tl.store(whole_ints + rows, argmax.to(tl.int64), mask=here)
    if DRAWN:
        logits = tl.load(floats + at + 4 * plane, mask=there, other=_NONE)
        scores = tl.load(floats + at + 5 * plane, mask=there, other=_NONE)
        tokens = tl.load(ints + at + plane, mask=there, other=_NO_TOKEN)
        score = tl.max(scores, 0)
        token = tl.min(tl.where(scores == score[None, :], tokens, _NO_TOKEN), 0)
        logit = tl.max(tl.where(tokens == token[None, :], logits, _NONE), 0)
        tl.store(whole_floats + rows + 4 * num_rows, logit, mask=here)
        tl.store(whole_floats + rows + 5 * num_rows, score, mask=here)
        tl.store(whole_ints + rows + num_rows, token.to(tl.int64), mask=here)


def options_for(
    tiles: Tiles, width: int, dtype: torch.dtype, *, interpreted: bool = bool(knobs.runtime.interpret)
) -> dict[str, Any]:
    """Returns the compile-time arguments of `scan_kernel`, and how it is started.

    Args:
        tiles: tile sizes.
        width: C of the inputs.
        dtype: that of the inputs.
        interpreted: whether Triton's interpreter runs it, which silently computes garbage from bfloat16 and
            knows no tensor-core formats.
    """
    return {
        "ROWS": tiles.rows,
        "TOKENS": tiles.tokens,
        "WIDTH": tiles.width,
        "NOISE": tiles.noise,
        "EVEN": width % tiles.width == 0,
        "PRECISION": "tf32x3" if dtype is torch.float32 and not interpreted else "ieee",
        "UPCAST": interpreted and dtype is torch.bfloat16,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _variant(dtype: torch.dtype, tiles: Tiles, full: bool, architectures: list[int]) -> dict[str, Any]:
    """Describes `scan_kernel` as a decoder starts it: contiguous inputs, a width that the tiles divide."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    kinds = dict.fromkeys(("hidden", "weight"), f"*{name}") | dict.fromkeys(("bias", "floats"), "*fp32")
    kinds |= {"keys": "*i64", "positions": "*i64", "ints": "*i32"}
    kinds |= dict.fromkeys(("softcap", "scale", "inverse_temperature"), "fp32")
    absent = [] if full else ["bias", "softcap", "keys", "positions", "inverse_temperature"]
    options = options_for(tiles, tiles.width, dtype, interpreted=False)
    constexprs = {key: value for key, value in options.items() if key.isupper()}
    constexprs |= {"hidden_step": 1, "weight_step": 1, **dict.fromkeys(absent)}
    kinds |= dict.fromkeys(constexprs, "constexpr")
    signature = {argument: kinds.get(argument, "i32") for argument in scan_kernel.arg_names}
    pointers = [argument for argument, kind in signature.items() if kind.startswith("*") and argument != "bias"]
    return {
        "name": f"token_head_{name}_{tiles.rows}x{tiles.tokens}" + "_full" * full,
        "kernel": scan_kernel,
        "signature": signature,
        "constexprs": constexprs,
        # A launch infers this by itself; without it loads would not be vectorised.
        "aligned": [*pointers, "width", "hidden_stride", "weight_stride"],
        "architectures": architectures,
        # Enough to compile: float16 takes the registers of bfloat16, and a plain scan fewer than a full one.
        "gate": full and dtype is not torch.float16,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "has_dot": True,
    }


def _combine_variant(full: bool) -> dict[str, Any]:
    constexprs = {"SPLITS": 512, "ROWS": COMBINED // 512, "DRAWN": full}
    kinds = {"floats": "*fp32", "ints": "*i32", "whole_floats": "*fp32", "whole_ints": "*i64"}
    kinds |= dict.fromkeys(constexprs, "constexpr")
    return {
        "name": "token_head_combine" + "_full" * full,
        "kernel": combine_kernel,
        "signature": {argument: kinds.get(argument, "i32") for argument in combine_kernel.arg_names},
        "constexprs": constexprs,
        "num_warps": 4,
        "num_stages": 1,
        "has_dot": False,
    }


def _variants() -> list[dict[str, Any]]:
    cases: dict[tuple[torch.dtype, Tiles, bool], list[int]] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for num_rows, full, architecture in itertools.product(
            (16, 32, 64, 128), (False, True), (80, 86, 89, 90, 100, 120)
        ):
            tiles = tiles_for(num_rows, dtype, drawn=full, capability=architecture // 10)
            architectures = cases.setdefault((dtype, tiles, full), [])
            if architecture not in architectures:
                architectures.append(architecture)
    return [_variant(*case, architectures) for case, architectures in cases.items()]


#: What to compile ahead of time: all tiles of `tiles_for`, without and with bias, softcap and draw.
VARIANTS: list[dict[str, Any]] = [*_variants(), *(_combine_variant(full) for full in (False, True))]
