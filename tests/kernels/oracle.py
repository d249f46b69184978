"""Attention in float64 by einsum, written apart from the library, and inputs to compare on."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain softmax attention; loops over heads so that grouping is spelled out."""
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, length, width = q.shape
    keys = k.shape[2]
    out = torch.zeros(batch, heads, length, width, dtype=torch.float64)
    lse = torch.full((batch, heads, length), -math.inf, dtype=torch.float64)
    add = torch.zeros(batch, heads, length, keys, dtype=torch.float64)
    if bias is not None:
        add = add + bias.double()
    if mask is not None:
        add = add.masked_fill(~mask.expand_as(add), -math.inf)
    if keys == 0 or heads == 0:
        return out, lse
    factor = scale if scale is not None else 1 / math.sqrt(max(width, 1))
    for head in range(heads):
        other = head // (heads // k.shape[1])
        logits = factor * torch.einsum("bid,bjd->bij", q[:, head], k[:, other]) + add[:, head]
        lse[:, head] = torch.logsumexp(logits, dim=-1)
        weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)
        out[:, head] = torch.einsum("bij,bjd->bid", weights, v[:, other])
    return out, lse


def inputs(
    batch: int,
    heads: int,
    key_heads: int,
    length: int,
    keys: int,
    width: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, width), (batch, key_heads, keys, width), (batch, key_heads, keys, width)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def difference(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """Largest difference of out and lse, relative to the largest magnitude; infinities must coincide."""
    worst = 0.0
    for a, b in zip(result, expected, strict=True):
        a, b = a.double().cpu(), b.double().cpu()
        assert a.shape == b.shape
        assert not a.isnan().any()
        assert torch.equal(a.isinf(), b.isinf()), "the empty rows differ"
        finite = ~b.isinf()
        if finite.any():
            error = (a[finite] - b[finite]).abs().max() / b[finite].abs().max().clamp(min=1.0)
            worst = max(worst, float(error))
    return worst


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
