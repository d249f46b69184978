"""Computes norms token by token in Triton: adaptive layer norm, and RMS norm with rotary embedding.

One program takes one token, or some of its heads, reads it once and writes it once. Otherwise all is as in
`norms_triton`. Importing this needs triton.
"""

# Triton is optional where types are checked, and a kernel is called with other types than it computes with.
# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from partsong.kernels.norms_triton import MAX_ROW, num_warps, variant

__all__ = ["VARIANTS", "adaptive_layer_norm", "residual_adaptive_layer_norm", "rms_norm_rotary"]

#: Elements one program takes where heads are normalised one by one.
TILE = 4096


@triton.jit
def _load_row(row: tl.tensor, channel: tl.tensor, channels: tl.tensor) -> tl.tensor:
    """Loads a token's channels as float32, with zeros after the last."""
    return tl.load(row + channel, mask=channel < channels, other=0.0).to(tl.float32)


@triton.jit
def _layer_norm(
    x: tl.tensor,
    residual: tl.tensor,
    gate: tl.tensor,
    shift: tl.tensor,
    scale: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    stream: tl.tensor,
    out: tl.tensor,
    eps: float,
    length: tl.tensor,
    channels: tl.tensor,
    x_batch: tl.tensor,
    x_token: tl.tensor,
    residual_batch: tl.tensor,
    residual_token: tl.tensor,
    gate_batch: tl.tensor,
    gate_token: tl.tensor,
    shift_batch: tl.tensor,
    shift_token: tl.tensor,
    scale_batch: tl.tensor,
    scale_token: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Computes one token: the sum with the residual if there is one, the norm over its channels, the modulation."""
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    channel = tl.arange(0, block)
    value = _load_row(x + batch * x_batch + token * x_token, channel, channels)
    if residual is not None:
        if gate is not None:
            value *= _load_row(gate + batch * gate_batch + token * gate_token, channel, channels)
        value += _load_row(residual + batch * residual_batch + token * residual_token, channel, channels)
        rounded = value.to(stream.dtype.element_ty)
        tl.store(stream + row * channels + channel, rounded, mask=channel < channels)
        value = rounded.to(tl.float32)
    centred = tl.where(channel < channels, value - tl.sum(value) / channels, 0.0)
    result = centred * tl.rsqrt(tl.sum(centred * centred) / channels + eps)
    if weight is not None:
        result *= _load_row(weight, channel, channels)
    if bias is not None:
        result += _load_row(bias, channel, channels)
    if scale is not None:
        result *= 1.0 + _load_row(scale + batch * scale_batch + token * scale_token, channel, channels)
    if shift is not None:
        result += _load_row(shift + batch * shift_batch + token * shift_token, channel, channels)
    tl.store(out + row * channels + channel, result, mask=channel < channels)


def adaptive_layer_norm(
    x: Tensor, shift: Tensor | None, scale: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Computes what `norms_naive.adaptive_layer_norm` does; x is not empty, out is contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_layer_norm((x, None, None, shift, scale), weight, bias, None, out, eps)
    return out


def residual_adaptive_layer_norm(
    x: Tensor,
    residual: Tensor,
    gate: Tensor | None,
    shift: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Computes what `norms_naive.residual_adaptive_layer_norm` does; x is not empty, results contiguous."""
    # Two allocations, so that the norm can be freed while the stream lives on.
    stream, out = (torch.empty(x.shape, dtype=residual.dtype, device=x.device) for _ in range(2))
    _launch_layer_norm((x, residual, gate, shift, scale), weight, bias, stream, out, eps)
    return stream, out


def _launch_layer_norm(
    by_token: Sequence[Tensor | None],
    weight: Tensor | None,
    bias: Tensor | None,
    stream: Tensor | None,
    out: Tensor,
    eps: float,
) -> None:
    batch, length, channels = out.shape
    by_token = [v if v is None or v.stride(2) == 1 else v.contiguous() for v in by_token]
    # Values that all samples or tokens share are read again for each, with a stride of 0.
    strides = [step for v in by_token for step in ((0, 0) if v is None else v.expand(out.shape).stride()[:2])]
    weight, bias = (None if v is None else v.contiguous() for v in (weight, bias))
    block = next_power_of_2(channels)
    with torch.cuda.device_of(out):
        _layer_norm[(batch * length,)](
            *by_token, weight, bias, stream, out, eps, length, channels, *strides, block, num_warps=num_warps(block)
        )


@triton.jit
def _load_pairs(
    rows: tl.tensor, valid: tl.tensor, size: tl.constexpr, block: tl.constexpr, interleaved: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Loads the first and second elements of the pairs in rows of `size` numbers, each `[rows, block / 2]` float32."""
    if interleaved:
        # One wide load, split in registers: two loads of every other element would move the same bytes twice.
        column = tl.arange(0, block)[None, :]
        row = tl.load(rows + column, mask=valid & (column < size), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(row, (row.shape[0], block // 2, 2)))
    else:
        column = tl.arange(0, block // 2)[None, :]
        mask = valid & (column < size // 2)
        first = tl.load(rows + column, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(rows + size // 2 + column, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(
    rows: tl.tensor,
    valid: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
    interleaved: tl.constexpr,
) -> None:
    """Stores pairs, the reverse of `_load_pairs`."""
    if interleaved:
        column = tl.arange(0, block)[None, :]
        row = tl.reshape(tl.join(first, second), (first.shape[0], block))
        tl.store(rows + column, row, mask=valid & (column < size))
    else:
        column = tl.arange(0, block // 2)[None, :]
        mask = valid & (column < size // 2)
        tl.store(rows + column, first, mask=mask)
        tl.store(rows + size // 2 + column, second, mask=mask)


@triton.jit
def _load_table(
    row: tl.tensor, size: tl.constexpr, block: tl.constexpr, interleaved: tl.constexpr, halved: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Loads a row of cos or sin for first and second elements of every pair, each `[1, block / 2]` float32."""
    zero = tl.arange(0, 1)[:, None]
    if halved:
        column = tl.arange(0, block // 2)[None, :]
        first = tl.load(row + column, mask=column < size // 2, other=0.0).to(tl.float32)
        second = first
    else:
        first, second = _load_pairs(row + zero, zero == 0, size, block, interleaved)
    return first, second


@triton.jit
def _rms_norm_rotary(
    x: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    eps: float,
    length: tl.tensor,
    heads: tl.tensor,
    x_batch: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    weight_head: tl.tensor,
    cos_batch: tl.tensor,
    cos_token: tl.tensor,
    sin_batch: tl.tensor,
    sin_token: tl.tensor,
    size: tl.constexpr,
    norm: tl.constexpr,
    interleaved: tl.constexpr,
    halved: tl.constexpr,
    block_heads: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Computes some heads of a token, all of them for norm "token": the norm, then every pair turned by its angle."""
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)[:, None]
    valid = head < heads
    rows = x + batch * x_batch + token * x_token + head.to(tl.int64) * x_head
    first, second = _load_pairs(rows, valid, size, block, interleaved)
    if norm is not None:
        mean = tl.sum(first * first + second * second, axis=1, keep_dims=True) / size
        if norm == "token":
            mean = tl.sum(mean, axis=0, keep_dims=True) / heads
        factor = tl.rsqrt(mean + eps)
        first *= factor
        second *= factor
    if weight is not None:
        weights = _load_pairs(weight + head * weight_head, valid, size, block, interleaved)
        first *= weights[0]
        second *= weights[1]
    if cos is not None:
        cosines = _load_table(cos + batch * cos_batch + token * cos_token, size, block, interleaved, halved)
        sines = _load_table(sin + batch * sin_batch + token * sin_token, size, block, interleaved, halved)
        turned = first * cosines[0] - second * sines[0]
        second = second * cosines[1] + first * sines[1]
        first = turned
    _store_pairs(out + (row * heads + head) * size, valid, first, second, size, block, interleaved)


def rms_norm_rotary(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    norm: str | None,
    eps: float,
) -> Tensor:
    """Computes what `norms_naive.rms_norm_rotary` does; x is not empty, out is contiguous."""
    batch, length, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x if x.stride(3) == 1 else x.contiguous()
    cos, sin = (v if v is None or v.stride(3) == 1 else v.contiguous() for v in (cos, sin))
    weight = None if weight is None else weight.contiguous()
    block = max(2, next_power_of_2(size))
    block_heads = next_power_of_2(heads)
    if norm != "token":
        block_heads = min(block_heads, max(1, TILE // block))
    strides = list(x.stride()[:3])
    strides.append(size if norm == "token" else 0)
    for table in (cos, sin):
        strides += (0, 0) if table is None else table.expand(batch, length, 1, -1).stride()[:2]
    halved = cos is not None and cos.shape[3] != size
    # Without tables pairs mean nothing, and neighbours take any head size in one load.
    interleaved = interleaved or cos is None
    with torch.cuda.device_of(x):
        _rms_norm_rotary[(batch * length, cdiv(heads, block_heads))](
            *(x, weight, cos, sin, out, eps, length, heads, *strides),
            *(size, norm, interleaved, halved, block_heads, block),
            num_warps=num_warps(block_heads * block),
        )
    return out


_PLAIN = {"residual": None, "gate": None, "stream": None, "weight": None, "bias": None, "block": 4096}
_WAN = {"*bf16": "x residual stream out", "*fp32": "gate shift scale weight bias"}
_WIDE = {"*fp32": "x residual stream out gate shift scale weight bias"}
_HEADS = {"size": 128, "interleaved": True, "halved": False, "block": 128}
_HALVES = {"interleaved": False, "halved": True}
_TYPES = {"*bf16": "x weight out", "*fp32": "cos sin"}

#: The forms of these kernels that matter: blocks of Flux and Wan, the widest row, halves as in CogView4, no tables.
VARIANTS: list[dict[str, Any]] = [
    variant("layer_norm_flux", _layer_norm, _PLAIN, {"*bf16": "x shift scale out"}, num_warps(4096)),
    variant("residual_layer_norm_wan", _layer_norm, {"block": 8192}, _WAN, num_warps(8192)),
    variant("residual_layer_norm_widest", _layer_norm, {"block": MAX_ROW}, _WIDE, num_warps(MAX_ROW)),
    *(
        variant(name, _rms_norm_rotary, _HEADS | form, _TYPES, num_warps(128 * form["block_heads"]))
        for name, form in {
            "rms_norm_rotary_flux": {"norm": "head", "block_heads": 32},
            "rms_norm_rotary_wan": {"norm": "token", "block_heads": 64},
            "rms_norm_rotary_halves": {"norm": "head", "block_heads": 32, **_HALVES},
            "rms_norm": {"norm": "head", "block_heads": 32, "cos": None, "sin": None},
        }.items()
    ),
]
