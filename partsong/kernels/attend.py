"""Holds `attention`, the one entrance to every attention kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.kernels.arguments import additive, check_init, check_mask, check_qkv, check_segments
from partsong.kernels.call import Call, Segment, compute_dtype
from partsong.kernels.dispatch import compute
from partsong.kernels.masks import Mask
from partsong.kernels.merge import merge

__all__ = ["attend_block", "attention"]


def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    mask: Tensor | Mask | tuple[Mask, Tensor] | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    segments: Sequence[Segment] | None = None,
    init: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes softmax attention and the log-sum-exp of its logits, so that partial results merge exactly.

    Args:
        q: queries `[B, Hq, Lq, D]`; any strides (only a last dim that is not contiguous is copied).
        k: keys `[B, Hkv, Lk, D]`; Hkv divides Hq, and query head h reads key head `h // (Hq // Hkv)`.
        v: values `[B, Hkv, Lk, D]`.
        mask: bool, True = attend, two to four dims that broadcast, aligned on the right, to `[B, Hq, Lq, Lk]`; or a
            kind (`Causal`, `BlockCausal`, `Streams`, `Tree`, `ChosenBlocks`), which needs no such tensor; or a pair
            (kind, bool tensor), where both must allow a key (causal with key padding).
        bias: float, added to the scaled logits; broadcasts as `mask` does.
        scale: factor on q.k; default `D ** -0.5`.
        segments: the keys and values as a table of `Segment`, instead of k and v: stale and fresh ones, ring blocks,
            a shared prefix and each stream's own. They are read where they lie; mask and bias run over them in order.
        init: an earlier (out, lse) over other keys, merged into the result: a ring step. out then has init's dtype,
            so a float32 init keeps float32 over the whole ring. The tensors of init are not changed.

    Returns:
        out `[B, Hq, Lq, D]` in q's dtype and, from the CPU kernel, in q's memory layout; lse `[B, Hq, Lq]`,
        contiguous, natural log, float32 (float64 for float64 inputs). A row with nothing to attend to has out 0 and
        lse -inf.

    Raises:
        ArgumentError: shapes, dtypes, devices, scale, masks or segments that do not fit.
        ArgumentTypeError: an argument of the wrong type.
        UnsupportedError: `force_backend` names a kernel that cannot do this.

    Source: FlashAttention-2, Dao, arXiv 2307.08691, for the log-sum-exp; its merge is `partsong.kernels.merge`.

    Example:
        >>> x = torch.ones(1, 2, 4, 8)
        >>> out, lse = attention(x, segments=[Segment(x, x), Segment(x, x, bias=math.log(3))])
        >>> bool(torch.allclose(lse, torch.tensor(8**0.5 + math.log(4 + 12))))
        True
    """
    if segments is None:
        if k is None or v is None:
            raise ArgumentError("attention needs k and v, or segments")
        check_qkv(q, k, v)
        table = (Segment(k, v, position=0),)
    else:
        if k is not None or v is not None:
            raise ArgumentError("attention takes the keys either as k, v or as segments, found both")
        table = check_segments(q, segments)
    segmented = segments is not None
    kind, keep = check_mask(q, table, mask, segmented) if segmented or mask is not None else (None, None)
    if init is not None:
        check_init(q, init)
    whole = sum(segment.length for segment in table)
    added = None if keep is None and bias is None else additive(q, whole, keep, bias)
    return _compute(Call(q, table, kind, added, _scale(q, scale), init))


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, init: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Does what `attention` does for one block of keys without a mask, whose tensors are known to fit.

    A ring calls it once for every rank, and a GPU waits for the host where checking takes longer than computing.
    """
    return _compute(Call(q, (Segment(k, v, position=0),), None, None, _scale(q, scale), init))


def _scale(q: Tensor, scale: float | None) -> float:
    if scale is None:
        return 1.0 / math.sqrt(q.shape[3]) if q.shape[3] else 1.0
    if not math.isfinite(scale):
        raise ArgumentError(f"attention needs a finite scale, found {scale}")
    return scale


def _compute(call: Call) -> tuple[Tensor, Tensor]:
    """Answers empty calls, on which kernels would read out of bounds or crash, and passes on the rest."""
    q, used = call.q, call.used()
    if used is not None and all(q.shape[:3]):
        return compute(used)
    lse = torch.full(q.shape[:3], -math.inf, dtype=compute_dtype(q.dtype), device=q.device)
    nothing = (torch.zeros_like(q), lse)
    return nothing if call.init is None else merge([call.init, nothing])
