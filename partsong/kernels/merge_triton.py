"""Merges attention over disjoint sets of keys in one Triton kernel, which reads every part once.

Importing this needs triton. Arithmetic is float32. The specification is `partsong.kernels.merge`.
"""

# Triton is optional where types are checked, and a kernel is called with other types than it computes with.
# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from partsong.kernels.norms_triton import variant

__all__ = ["MOST", "VARIANTS", "merged"]

#: Most parts that one launch merges.
MOST = 8
#: Elements of the tile that a program keeps.
TILE = 4096


@triton.jit
def merge_kernel(
    outs: tl.tensor,
    lses: tl.tensor,
    strides: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    out_row: tl.tensor,
    heads: tl.tensor,
    length: tl.tensor,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merges the rows of one tile of one head; `strides` are batch, head and row of each part, one after the other."""
    rows = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    pair = tl.program_id(1).to(tl.int64)
    batch, head, columns = pair // heads, pair % heads, tl.arange(0, BLOCK_D)
    row_in = rows < length
    inside = row_in[:, None] & (columns < WIDTH)[None, :]
    place = pair * length + rows
    top = tl.full([BLOCK_L], float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        top = tl.maximum(top, tl.load(lses[part] + place, mask=row_in, other=float("-inf")))
    # An empty row has no largest value to subtract: -inf - -inf would be NaN.
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_L], tl.float32)
    sums = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
    for part in tl.static_range(PARTS):
        weight = tl.exp(tl.load(lses[part] + place, mask=row_in, other=float("-inf")) - top)
        start = batch * strides[3 * part] + head * strides[3 * part + 1]
        where = start + rows[:, None].to(tl.int64) * strides[3 * part + 2] + columns[None, :]
        sums += weight[:, None] * tl.load(outs[part] + where, mask=inside, other=0.0).to(tl.float32)
        total += weight
    divisor = tl.where(total == 0.0, 1.0, total)
    sums = sums / divisor[:, None]
    where = batch * out_batch + head * out_head + rows[:, None].to(tl.int64) * out_row + columns[None, :]
    tl.store(out + where, sums.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + place, tl.where(total == 0.0, float("-inf"), top + tl.log(divisor)), mask=row_in)


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges two to `MOST` parts, out `[B, H, L, D]` and lse `[B, H, L]`, into the first one's dtype and layout.

    Rows have unit stride, no tensor is float64, and none needs a gradient.
    """
    outs = tuple(out for out, _ in parts)
    lses = tuple(lse.contiguous() for _, lse in parts)
    first = outs[0]
    batch, heads, length, width = first.shape
    out, lse = torch.empty_like(first), torch.empty(first.shape[:3], dtype=torch.float32, device=first.device)
    strides = tuple(itertools.chain.from_iterable(part.stride()[:3] for part in outs))
    block_d = triton.next_power_of_2(width)
    block_l = max(TILE // block_d, 1)
    # Triton starts kernels on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(first):
        merge_kernel[(triton.cdiv(length, block_l), batch * heads)](
            outs, lses, strides, out, lse, *out.stride()[:3], heads, length,
            PARTS=len(parts), WIDTH=width, BLOCK_L=block_l, BLOCK_D=block_d, num_warps=8,
        )  # fmt: skip
    return out, lse


def _variant(kind: str, parts: int) -> dict[str, Any]:
    sizes = {"PARTS": parts, "WIDTH": 128, "BLOCK_L": TILE // 128, "BLOCK_D": 128}
    found = variant(f"merge {parts} parts", merge_kernel, sizes, {"*fp32": "lse"}, 8)
    several = {"lses": ("*fp32",) * parts, "strides": ("i32",) * (3 * parts)}
    found["signature"] |= {"out": kind, "outs": (kind, *("*bf16",) * (parts - 1)), **several}
    return found


#: The forms of this kernel that matter: a block of a ring into the sum so far, and the returned parts of eight ranks.
VARIANTS = [_variant("*fp32", 2), _variant("*bf16", MOST)]
