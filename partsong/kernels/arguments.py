"""Checks `attention`'s arguments and folds mask, bias and segments into one additive tensor.

The aten operators below these checks read out of bounds, return garbage or kill the process on shapes they do not
expect, so nothing reaches them unchecked. The common case has to cost about a microsecond: one combined test passes,
and only a failure is taken apart to say what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from partsong.errors import ArgumentError, ArgumentTypeError

__all__ = ["Run", "additive", "check_qkv", "check_runs", "compute_dtype"]

#: One run of neighbouring keys: (how many, what is added to each key's logit).
Run = tuple[int, float]

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype logits, log-sum-exp and accumulators have: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises unless q is `[B, Hq, Lq, D]` and k, v are `[B, Hkv, Lk, D]`, all of one float dtype and device."""
    try:
        q_shape, k_shape = q.shape, k.shape
        if (
            len(q_shape) == len(k_shape) == 4
            and k_shape == v.shape
            and q_shape[0] == k_shape[0]
            and q_shape[3] == k_shape[3]
            and (q_shape[1] % k_shape[1] == 0 if k_shape[1] else q_shape[1] == 0)
            and q.dtype is k.dtype is v.dtype
            and q.dtype in _FLOATS
            and q.device == k.device == v.device
        ):
            return
    except AttributeError:
        pass  # not tensors: told apart below
    raise _qkv_error(q, k, v)


def _qkv_error(q: Tensor, k: Tensor, v: Tensor) -> Exception:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            return ArgumentTypeError(f"attention needs {name} to be a tensor, found {type(x).__name__}")
    found = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        return ArgumentError(f"attention needs q [B, Hq, Lq, D] and k, v [B, Hkv, Lk, D]; found {found}")
    if not (q.dtype is k.dtype is v.dtype and q.dtype in _FLOATS):
        return ArgumentError(
            f"attention needs q, k, v of one dtype out of float16, bfloat16, float32, float64; "
            f"found {q.dtype}, {k.dtype}, {v.dtype}: cast them to one"
        )
    if not q.device == k.device == v.device:
        return ArgumentError(f"attention needs q, k, v on one device; found {q.device}, {k.device}, {v.device}")
    if k.shape != v.shape or q.shape[3] != k.shape[3]:
        return ArgumentError(f"attention needs k and v of one shape, with q's head size D; found {found}")
    if q.shape[0] != k.shape[0]:
        return ArgumentError(f"attention needs one batch size B; found {found}: expand k and v (no copy is made)")
    return ArgumentError(
        f"attention needs the number of key heads to divide the number of query heads; "
        f"found {q.shape[1]} query heads and {k.shape[1]} key heads"
    )


def check_runs(segments: Iterable[tuple[int, float]], num_keys: int) -> list[Run]:
    """Checks `segments` and drops the empty runs.

    Raises:
        ArgumentError: a length is negative, a bias is NaN or +inf, or the lengths do not add up to `num_keys`.
        ArgumentTypeError: a run is not a (length, bias) pair of numbers.
    """
    runs: list[Run] = []
    for run in segments:
        try:
            length, bias = run
            whole, logit = int(length), float(bias)
        except (TypeError, ValueError) as error:
            raise ArgumentTypeError(f"a segment is a pair (length, logit bias), found {run!r}") from error
        if whole != length or whole < 0 or math.isnan(logit) or logit == math.inf:
            raise ArgumentError(f"a segment needs a length >= 0 and a bias that is finite or -inf, found {run!r}")
        if whole:
            runs.append((whole, logit))
    total = sum(length for length, _ in runs)
    if total != num_keys:
        raise ArgumentError(f"the segments cover {total} keys but k has {num_keys}; make the lengths add up to it")
    return runs


def additive(
    q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None, runs: Sequence[Run] | None
) -> Tensor | None:
    """One tensor to add to the logits, or None.

    Returns:
        float32 (float64 for float64 q), four dims, each 1 or the full size of `[B, Hq, Lq, Lk]`; -inf where `mask`
        is False.

    Raises:
        ArgumentError: mask or bias does not broadcast to `[B, Hq, Lq, Lk]` or is on another device.
        ArgumentTypeError: mask is not bool or bias is not floating point.
    """
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    total: Tensor | None = None
    if bias is not None:
        if not isinstance(bias, Tensor) or not bias.is_floating_point():
            raise ArgumentTypeError(f"bias is a float tensor added to the logits, found {_describe(bias)}")
        total = _four_dims("bias", bias, full, q.device).to(compute_dtype(q.dtype))
    if runs is not None and any(logit for _, logit in runs):
        row = torch.tensor([logit for _, logit in runs], dtype=compute_dtype(q.dtype))
        row = row.repeat_interleave(torch.tensor([length for length, _ in runs])).to(q.device).view(1, 1, 1, -1)
        total = row if total is None else total + row
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            raise ArgumentTypeError(f"mask is a bool tensor, True = attend, found {_describe(mask)}; floats go to bias")
        mask = _four_dims("mask", mask, full, q.device)
        zero = torch.zeros((), dtype=compute_dtype(q.dtype), device=q.device)
        total = torch.where(mask, zero if total is None else total, -math.inf)
    return total


def _four_dims(name: str, x: Tensor, full: tuple[int, int, int, int], device: torch.device) -> Tensor:
    if not 2 <= x.dim() <= 4 or any(
        size not in (1, want) for size, want in zip(x.shape, full[4 - x.dim() :], strict=True)
    ):
        hint = ""
        if x.dim() == 3 and x.shape[0] == full[0]:
            hint = "; three dims mean [Hq, Lq, Lk], so write a per-sample one as [B, 1, Lq, Lk]"
        elif x.dim() == 2 and tuple(x.shape) == (full[0], full[3]):
            hint = "; two dims mean [Lq, Lk], so write a padding mask as [B, 1, 1, Lk]"
        raise ArgumentError(f"{name} {tuple(x.shape)} does not broadcast to [B, Hq, Lq, Lk] = {list(full)}{hint}")
    if x.device != device:
        raise ArgumentError(f"{name} is on {x.device} but q is on {device}; move it there")
    return x.view((1,) * (4 - x.dim()) + tuple(x.shape))


def _describe(x: object) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
