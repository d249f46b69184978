"""Checks `attention`'s arguments, and folds bool mask and bias into one additive tensor.

The aten operators below these checks read out of bounds, return garbage or kill the process on shapes they do not
expect, so nothing reaches them unchecked. The common case has to cost about a microsecond: one combined test passes,
and only after a failure is the reason found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.kernels.call import Segment, compute_dtype
from partsong.kernels.masks import KINDS, SHARED, BlockCausal, ChosenBlocks, Mask, Streams, describe

__all__ = ["additive", "check_init", "check_mask", "check_qkv", "check_segments"]

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


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
        pass  # not tensors: `_qkv_error` says which
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


def check_segments(q: Tensor, segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Checks `segments`, gives each its position and drops those that are empty or left out.

    Raises:
        ArgumentError: shapes, dtypes or devices that do not fit q's, a bias that is NaN or +inf, a bad stream.
        ArgumentTypeError: something other than `Segment`.
    """
    kept, position = [], 0
    for index, segment in enumerate(segments):
        if not isinstance(segment, Segment):
            raise ArgumentTypeError(
                f"segments are a sequence of partsong.kernels.Segment; number {index} is {describe(segment)}"
            )
        try:
            check_qkv(q, segment.k, segment.v)
        except (ArgumentError, ArgumentTypeError) as error:
            raise type(error)(f"segment {index}: {error}") from None
        bias, stream = float(segment.bias), segment.stream
        if math.isnan(bias) or bias == math.inf:
            raise ArgumentError(f"segment {index} needs a bias that is finite or -inf, found {bias}")
        if isinstance(stream, bool) or not isinstance(stream, int) or stream < SHARED:
            raise ArgumentError(f"segment {index} needs a stream >= 0, or -1 for all of them, found {stream!r}")
        position = position if segment.position is None else segment.position
        kept.append(replace(segment, bias=bias, position=position))
        position += segment.length
    return tuple(kept)


def check_mask(
    q: Tensor, segments: Sequence[Segment], mask: object, segmented: bool
) -> tuple[Mask | None, Tensor | None]:
    """Tells a mask kind from a bool tensor; a pair of both means that both must allow a key.

    Raises:
        ArgumentError: the kind does not fit the sizes, or both it and the segments say which stream a key belongs to.
        ArgumentTypeError: neither a kind, a bool tensor, nor a pair of them.
    """
    pair: tuple[Any, Any] = mask if isinstance(mask, tuple) and len(mask) == 2 else (mask, None)
    kind, keep = pair
    if isinstance(kind, Tensor) and keep is None:
        kind, keep = None, kind
    if not (kind is None or isinstance(kind, KINDS)) or not (keep is None or isinstance(keep, Tensor)):
        raise ArgumentTypeError(
            "mask is a bool tensor (True = attend), one of Causal, BlockCausal, Streams, Tree and ChosenBlocks, or a "
            f"pair (kind, bool tensor); found {describe(mask)}"
        )
    streamed = any(segment.stream != SHARED for segment in segments)
    if streamed and not isinstance(kind, Streams):
        raise ArgumentError(
            "segments have a stream, which only a Streams mask reads: leave it out, or give mask=Streams(...)"
        )
    if kind is None:
        return None, keep
    kind.check(q.shape[0], q.shape[2], sum(segment.length for segment in segments))
    if isinstance(kind, ChosenBlocks):
        _check_blocks(kind, q, segmented)
    if isinstance(kind, BlockCausal) and any((segment.position or 0) < 0 for segment in segments):
        raise ArgumentError("BlockCausal needs segments at positions of at least 0")
    if isinstance(kind, Streams):
        if kind.key is None and not segmented:
            raise ArgumentError("Streams needs key ids (key=) where the keys do not come as segments with a stream")
        if kind.key is not None and streamed:
            raise ArgumentError("Streams has key ids and the segments have a stream: give one of the two")
    return cast(Mask, kind), keep


def _check_blocks(kind: ChosenBlocks, q: Tensor, segmented: bool) -> None:
    if segmented:
        raise ArgumentError("ChosenBlocks needs the keys as k and v, not in segments: put them together")
    if kind.chosen.shape[1] not in (1, q.shape[1]):
        raise ArgumentError(
            f"ChosenBlocks: chosen is for {kind.chosen.shape[1]} heads and there are {q.shape[1]}; give 1 or all"
        )
    if kind.chosen.device != q.device:
        raise ArgumentError(f"ChosenBlocks: chosen is on {kind.chosen.device} but q is on {q.device}; move it there")


def check_init(q: Tensor, init: object) -> None:
    """Raises unless `init` is (out, lse) of q's shape, on q's device."""
    if not (isinstance(init, tuple | list) and len(init) == 2 and all(isinstance(x, Tensor) for x in init)):
        raise ArgumentTypeError(f"init is a pair (out, lse) of an earlier attention, found {describe(init)}")
    out, lse = init
    if out.shape != q.shape or lse.shape != q.shape[:3] or not (out.is_floating_point() and lse.is_floating_point()):
        raise ArgumentError(
            f"init needs out {tuple(q.shape)} and lse {tuple(q.shape[:3])}, found {tuple(out.shape)} of {out.dtype} "
            f"and {tuple(lse.shape)} of {lse.dtype}"
        )
    if not out.device == lse.device == q.device:
        raise ArgumentError(f"init is on {out.device} and {lse.device} but q is on {q.device}; move it there")


def additive(q: Tensor, num_keys: int, mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Returns one tensor to add to the logits, or None.

    Returns:
        float32 (float64 for float64 q), four dims, each 1 or the full size of `[B, Hq, Lq, Lk]`; -inf where `mask`
        is False.

    Raises:
        ArgumentError: mask or bias does not broadcast to `[B, Hq, Lq, Lk]` or is on another device.
        ArgumentTypeError: mask is not bool or bias is not floating point.
    """
    full = (q.shape[0], q.shape[1], q.shape[2], num_keys)
    total: Tensor | None = None
    if bias is not None:
        if not isinstance(bias, Tensor) or not bias.is_floating_point():
            raise ArgumentTypeError(f"bias is a float tensor added to the logits, found {describe(bias)}")
        total = _four_dims("bias", bias, full, q.device).to(compute_dtype(q.dtype))
    if mask is not None:
        if mask.dtype is not torch.bool:
            raise ArgumentTypeError(f"mask is a bool tensor, True = attend, found {describe(mask)}; floats go to bias")
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
