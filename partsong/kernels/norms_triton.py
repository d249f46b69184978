"""Computes group norm in Triton, and holds the shared parts of all norm kernels. Importing this needs triton.

All arithmetic is float32: every load is widened first and every store rounds. Offsets have 64 bits, since the
activations of a video decoder have more than 2^31 elements. Which optional arguments are None is known when a kernel
is compiled, so omitted arguments cost nothing. The specifications are in `norms_naive`.
"""

# Triton is optional where types are checked, and a kernel is called with other types than it computes with.
# pyright: reportMissingImports=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

__all__ = ["VARIANTS", "group_norm_apply", "group_norm_stats", "num_warps", "supports", "variant"]

#: Longest row that one program holds in registers without spilling.
MAX_ROW = 8192
#: Elements of a tile of group norm, and the fewest that one program reads for statistics.
TILE, PART = 2048, 16384
#: Most parts that a line is cut into, and how many parts are merged at once.
MAX_PARTS, PARTS = 256, 1024


def supports(tensors: Sequence[Tensor], row: int) -> tuple[bool, str]:
    """Whether CUDA tensors with rows of this length can be computed correctly, and why (not)."""
    if not tensors[0].numel():
        return False, "there is nothing to compute"
    if any(x.dtype is torch.float64 for x in tensors):
        return False, "it computes in float32, and a tensor is float64"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False, "an input requires a gradient and it has none (use torch.no_grad())"
    if row > MAX_ROW:
        return False, f"a row is longer than {MAX_ROW}"
    return True, "Triton"


def num_warps(block: int) -> int:
    """Returns the warps for a block: 16 elements to a thread, which are two wide loads in half precision."""
    return min(16, max(1, block // 512))


@triton.jit
def _line_parts(
    x: tl.tensor,
    means: tl.tensor,
    squares: tl.tensor,
    lines: tl.tensor,
    length: tl.tensor,
    part_length: tl.tensor,
    x_batch: tl.tensor,
    x_line: tl.tensor,
    x_position: tl.tensor,
    block_lines: tl.constexpr,
    block_length: tl.constexpr,
) -> None:
    """Computes mean and sum of squared deviations of one part of each of a few lines.

    Every lane runs Welford's recurrence over the elements it meets. They are taken relative to the line's first
    element, so that the means of lanes and parts are small and keep their digits where the line's mean is large.
    """
    strips = tl.cdiv(lines, block_lines)
    batch = (tl.program_id(0) // strips).to(tl.int64)
    line = tl.program_id(0) % strips * block_lines + tl.arange(0, block_lines)[:, None].to(tl.int64)
    position = tl.arange(0, block_length)[None, :].to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * part_length
    left = tl.minimum(length - start, part_length)
    first = x + batch * x_batch + line * x_line
    origin = tl.load(first, mask=line < lines, other=0.0).to(tl.float32)
    pointers = first + (start + position) * x_position
    mean = tl.zeros((block_lines, block_length), tl.float32)
    square = tl.zeros((block_lines, block_length), tl.float32)
    for step in range(tl.cdiv(left, block_length)):
        valid = (line < lines) & (position < left - step * block_length)
        value = tl.load(pointers, mask=valid, other=0.0).to(tl.float32) - origin
        change = tl.where(valid, value - mean, 0.0)
        mean += change * (1.0 / (step + 1))
        square += change * (value - mean)
        pointers += block_length * x_position
    # How many elements each lane has met.
    count = ((left - position + block_length - 1) // block_length).to(tl.float32)
    whole = tl.sum(count * mean, axis=1, keep_dims=True) / left
    total = tl.sum(square + count * (mean - whole) * (mean - whole), axis=1, keep_dims=True)
    at = (batch * lines + line) * tl.num_programs(1) + tl.program_id(1)
    tl.store(means + at, whole, mask=line < lines)
    tl.store(squares + at, total, mask=line < lines)


@triton.jit
def _part_means(
    first: tl.tensor,
    means: tl.tensor,
    entry: tl.tensor,
    group_lines: tl.tensor,
    length: tl.tensor,
    part_length: tl.tensor,
    num_parts: tl.tensor,
    x_line: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the means of a group's parts, relative to the group's first element, and each part's share of it."""
    valid = entry < group_lines * num_parts
    part = entry % num_parts
    size = tl.where(valid, tl.minimum(length - part * part_length, part_length), 0)
    origin = tl.load(first + entry // num_parts * x_line, mask=valid, other=0.0).to(tl.float32)
    mean = tl.load(means + entry, mask=valid, other=0.0) + (origin - tl.load(first).to(tl.float32))
    return mean, size.to(tl.float32) / length / group_lines


@triton.jit
def _group_whole(
    x: tl.tensor,
    means: tl.tensor,
    squares: tl.tensor,
    mean_out: tl.tensor,
    var_out: tl.tensor,
    num_groups: tl.tensor,
    group_lines: tl.tensor,
    length: tl.tensor,
    part_length: tl.tensor,
    num_parts: tl.tensor,
    x_batch: tl.tensor,
    x_line: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Computes mean and variance of a group out of all parts of all its lines, as `_line_parts` left them."""
    group = tl.program_id(0).to(tl.int64)
    entries = group_lines * num_parts
    means += group * entries
    squares += group * entries
    first = x + group // num_groups * x_batch + group % num_groups * group_lines * x_line
    entry = tl.arange(0, block).to(tl.int64)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, entries, block):
        mean, share = _part_means(first, means, start + entry, group_lines, length, part_length, num_parts, x_line)
        total += share * mean
    whole = tl.sum(total)
    spread = tl.zeros((block,), tl.float32)
    for start in range(0, entries, block):
        mean, share = _part_means(first, means, start + entry, group_lines, length, part_length, num_parts, x_line)
        square = tl.load(squares + start + entry, mask=start + entry < entries, other=0.0)
        spread += square / length / group_lines + share * (mean - whole) * (mean - whole)
    tl.store(mean_out + group, tl.load(first).to(tl.float32) + whole)
    tl.store(var_out + group, tl.sum(spread))


def group_norm_stats(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Computes what `norms_naive.group_norm_stats` does, in one pass over x; x is not empty."""
    lines = _lines(x.reshape(x.shape[0], x.shape[1], -1), num_groups)
    batch, num_lines, length = lines.shape
    block_lines, block_length = _tile(lines)
    part_length = max(PART // block_lines, cdiv(length, MAX_PARTS))
    part_length = cdiv(part_length, block_length) * block_length
    parts = cdiv(length, part_length)
    means, squares = torch.empty((2, batch, num_lines, parts), dtype=torch.float32, device=x.device)
    mean, var = torch.empty((2, batch, num_groups), dtype=torch.float32, device=x.device)
    sizes, (x_batch, x_line, x_position) = (length, part_length), lines.stride()
    with torch.cuda.device_of(x):
        _line_parts[(batch * cdiv(num_lines, block_lines), parts)](
            *(lines, means, squares, num_lines, *sizes, x_batch, x_line, x_position, block_lines, block_length),
            num_warps=num_warps(block_lines * block_length),
        )
        _group_whole[(batch * num_groups,)](
            *(lines, means, squares, mean, var, num_groups, num_lines // num_groups, *sizes, parts, x_batch, x_line),
            block=PARTS,
            num_warps=num_warps(PARTS),
        )
    return mean, var


def _lines(x: Tensor, num_groups: int) -> Tensor:
    """Views x `[B, C, S]` as `[B, lines, length]`, where a group is several consecutive lines, without a copy.

    A group that is one run of memory, in whichever order, is one line; else its channels are.
    """
    grouped = x.unflatten(1, (num_groups, -1))
    (width, length), (channel, position) = grouped.shape[2:], grouped.stride()[2:]
    if width == 1 or length == 1 or channel == length * position:
        return grouped.flatten(2)
    return grouped.transpose(2, 3).flatten(2) if position == width * channel else x


def _tile(x: Tensor) -> tuple[int, int]:
    """Says how many lines of x `[B, lines, length]` one tile takes, and how much of each.

    A tile holds as much as possible of contiguous lines, or else of 64 lines side by side, which fill cache lines too.
    """
    lines, length = next_power_of_2(x.shape[1]), next_power_of_2(x.shape[2])
    block_lines = 1 if x.stride(2) == 1 else min(64, lines)
    block_length = min(TILE // block_lines, length)
    return min(TILE // block_length, lines), block_length


@triton.jit
def _group_apply(
    x: tl.tensor,
    mean: tl.tensor,
    var: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    eps: float,
    num_groups: tl.tensor,
    channels: tl.tensor,
    length: tl.tensor,
    x_batch: tl.tensor,
    x_channel: tl.tensor,
    x_position: tl.tensor,
    out_batch: tl.tensor,
    out_channel: tl.tensor,
    out_position: tl.tensor,
    block_channels: tl.constexpr,
    block_length: tl.constexpr,
) -> None:
    """Normalises one tile `[block_channels, block_length]` of one sample."""
    tiles = tl.cdiv(length, block_length)
    strip = tl.program_id(0) // tiles
    strips = tl.cdiv(channels, block_channels)
    batch = (strip // strips).to(tl.int64)
    channel = strip % strips * block_channels + tl.arange(0, block_channels)[:, None].to(tl.int64)
    position = tl.program_id(0) % tiles * block_length + tl.arange(0, block_length)[None, :].to(tl.int64)
    known = channel < channels
    group = batch * num_groups + channel // (channels // num_groups)
    centre = tl.load(mean + group, mask=known, other=0.0).to(tl.float32)
    gain = tl.rsqrt(tl.load(var + group, mask=known, other=1.0).to(tl.float32) + eps)
    if weight is not None:
        gain *= tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    valid = known & (position < length)
    value = tl.load(x + batch * x_batch + channel * x_channel + position * x_position, mask=valid, other=0.0)
    result = (value.to(tl.float32) - centre) * gain
    if bias is not None:
        result += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    tl.store(out + batch * out_batch + channel * out_channel + position * out_position, result, mask=valid)


def group_norm_apply(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Computes what `norms_naive.group_norm_apply` does; x is not empty."""
    flat = x.reshape(x.shape[0], x.shape[1], -1)
    out = torch.empty_like(flat)
    batch, channels, length = flat.shape
    block_channels, block_length = _tile(flat)
    mean, var = mean.contiguous(), var.contiguous()
    weight, bias = (None if v is None else v.contiguous() for v in (weight, bias))
    grid = (batch * cdiv(channels, block_channels) * cdiv(length, block_length),)
    sizes = mean.shape[1], channels, length
    warps = num_warps(block_length * block_channels)
    with torch.cuda.device_of(x):
        _group_apply[grid](
            *(flat, mean, var, weight, bias, out, eps, *sizes, *flat.stride(), *out.stride()),
            *(block_channels, block_length),
            num_warps=warps,
        )
    return out.view(x.shape)


def variant(
    name: str, kernel: Any, constexprs: Mapping[str, object], types: Mapping[str, str], warps: int
) -> dict[str, Any]:
    """Describes one form in which a kernel is compiled, to check it without a GPU.

    Args:
        name: what the form is called.
        kernel: the Triton function.
        constexprs: arguments known when it is compiled; a pointer that is left out is None.
        types: for each Triton type the names of the arguments that have it; eps is fp32, the others are i32.
        warps: warps of one program.

    Returns:
        name, kernel, signature (argument to type, in order), constexprs, num_warps, num_stages, has_dot.
    """
    known = {arg: kind for kind, names in types.items() for arg in names.split()}
    known |= {"eps": "fp32"} | dict.fromkeys(constexprs, "constexpr")
    return {
        "name": name,
        "kernel": kernel,
        "signature": {arg: known.get(arg, "i32") for arg in kernel.arg_names},
        "constexprs": dict(constexprs),
        "num_warps": warps,
        "num_stages": 3,
        "has_dot": False,
    }


_STATS = {"*bf16": "x", "*fp32": "means squares mean_out var_out"}
_APPLY = {"*bf16": "x weight bias out", "*fp32": "mean var"}

#: The forms of these kernels that matter: contiguous images and channels-last ones.
VARIANTS: list[dict[str, Any]] = [
    variant("line_parts", _line_parts, {"block_lines": 1, "block_length": TILE}, _STATS, 4),
    variant("line_parts_channels_last", _line_parts, {"block_lines": 64, "block_length": 32}, _STATS, 4),
    variant("group_whole", _group_whole, {"block": PARTS}, _STATS, 2),
    variant("group_apply", _group_apply, {"block_channels": 1, "block_length": TILE}, _APPLY, 4),
    variant("group_apply_channels_last", _group_apply, {"block_channels": 64, "block_length": 32}, _APPLY, 4),
]
