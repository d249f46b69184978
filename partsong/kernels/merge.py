"""Combines attention results over disjoint sets of keys exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.kernels.call import triton_refusal

__all__ = ["fused_without_values", "merge", "merge_checked"]

#: Whether tensors without values stand for those of a GPU.
_ON_GPU: ContextVar[bool] = ContextVar("partsong_merge_on_gpu", default=False)


def merge(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combines attention over disjoint sets of keys into attention over their union.

    With m the largest of the parts' log-sum-exps and w_i = exp(lse_i - m): out = sum w_i out_i / sum w_i and
    lse = m + ln sum w_i. Parts that are empty in a row (lse -inf) count nothing there, and a row that is empty in
    every part stays empty: no NaN arises. Every part is read once. There may be any number of parts, in any order.

    Args:
        parts: (out, lse) pairs; out is `[..., L, D]` with finite values, lse is `[..., L]`, natural log.

    Returns:
        (out, lse) of the union: accumulated in float32 (float64 if any tensor is float64), out returned in the first
        part's dtype and memory layout, lse in the accumulator's. To lose nothing over many merges, make the first
        part float32. A single part comes back as it is.

    Raises:
        ArgumentError: no parts, or shapes or devices that differ.
        ArgumentTypeError: a part is not a pair of float tensors.

    Source: the split softmax of Milakov and Gimelshein, arXiv 1805.02867, section 3.
    """
    parts = list(parts)
    _check(parts)
    return merge_checked(parts)


def merge_checked(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Does what `merge` does, for parts that are known to fit."""
    first = parts[0][0]
    wide = any(x.dtype is torch.float64 for part in parts for x in part)
    dtype = torch.float64 if wide else torch.float32
    if len(parts) == 1:
        return first, parts[0][1].to(dtype)
    if not wide and _is_fused(parts):
        return _merged_by_triton(parts)
    if first.is_meta and _ON_GPU.get():
        out = functools.reduce(torch.add, (out for out, _ in parts))
        return out.to(first.dtype), parts[0][1].new_empty(first.shape[:-1], dtype=dtype)
    lses = [lse.to(dtype) for _, lse in parts]
    top = functools.reduce(torch.maximum, lses)
    # An empty row has no largest value to subtract: -inf - -inf would be NaN.
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = [torch.exp(lse - top) for lse in lses]
    total = functools.reduce(torch.add, weights)
    divisor = total.masked_fill(total == 0.0, 1.0)
    out = first.to(dtype) * (weights[0] / divisor).unsqueeze(-1)
    for (part, _), weight in zip(parts[1:], weights[1:], strict=True):
        out.addcmul_(part.to(dtype), (weight / divisor).unsqueeze(-1))
    return out.to(first.dtype), top + torch.log(total)


@contextmanager
def fused_without_values() -> Iterator[None]:
    """Lets results without values be merged by one operator for each further part, as those on a GPU are."""
    token = _ON_GPU.set(True)
    try:
        yield
    finally:
        _ON_GPU.reset(token)


def _is_fused(parts: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Says whether the fused kernel, which has no gradient, reads these parts: heads of a GPU, row by row."""
    first = parts[0][0]
    if triton_refusal(first.device) or first.dim() != 4 or first.shape[0] * first.shape[1] > 65535:
        return False
    if any(out.stride(3) != 1 for out, _ in parts):
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for part in parts for x in part))


def _merged_by_triton(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    from partsong.kernels.merge_triton import MOST, merged

    total = merged(parts[:MOST])
    for start in range(MOST, len(parts), MOST - 1):
        total = merged([total, *parts[start : start + MOST - 1]])
    return total


def _check(parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    if not parts:
        raise ArgumentError("merge needs at least one (out, lse) pair, found none")
    for index, part in enumerate(parts):
        if not (isinstance(part, tuple | list) and len(part) == 2):
            raise ArgumentTypeError(f"merge needs (out, lse) pairs; part {index} is a {type(part).__name__}")
        for name, x in zip(("out", "lse"), part, strict=True):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise ArgumentTypeError(f"merge needs float tensors; {name} of part {index} is {kind}")
        out, lse = part
        if out.shape != parts[0][0].shape or lse.shape != out.shape[:-1]:
            raise ArgumentError(
                f"merge needs every out of one shape [..., L, D] with lse [..., L]; part {index} has out "
                f"{tuple(out.shape)} and lse {tuple(lse.shape)}, part 0 has out {tuple(parts[0][0].shape)}"
            )
        if out.device != parts[0][0].device or lse.device != out.device:
            raise ArgumentError(
                f"merge needs one device; part {index} is on {out.device} and {lse.device}, "
                f"part 0 on {parts[0][0].device}"
            )
