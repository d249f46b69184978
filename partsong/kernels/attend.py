"""`attention`: the one entrance to every attention kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.kernels.arguments import Run, additive, check_qkv, check_runs, compute_dtype
from partsong.kernels.backends import choose
from partsong.kernels.merge import merge

__all__ = ["attention"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    segments: Sequence[tuple[int, float]] | None = None,
    init: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention together with the log-sum-exp of its logits, so that partial results can be merged exactly.

    Args:
        q: queries `[B, Hq, Lq, D]`; any strides (only a last dim that is not contiguous is copied).
        k: keys `[B, Hkv, Lk, D]`; Hkv divides Hq, and query head h reads key head `h // (Hq // Hkv)`.
        v: values `[B, Hkv, Lk, D]`.
        mask: bool, True = attend; two to four dims that broadcast, aligned on the right, to `[B, Hq, Lq, Lk]`.
        bias: float, added to the scaled logits; broadcasts as `mask` does.
        scale: factor on q.k; default `D ** -0.5`.
        segments: runs of neighbouring keys as (length, logit bias), the lengths adding up to Lk; the bias is added to
            every key of its run. A key that stands for r keys gets `math.log(r)` (dual-scope attention); `-inf`
            leaves a run out.
        init: an earlier (out, lse) over other keys, merged into the result: a ring step. out then has init's dtype,
            so a float32 init keeps float32 over the whole ring. The tensors of init are not changed.

    Returns:
        out `[B, Hq, Lq, D]` in q's dtype and, from the CPU kernel, in q's memory layout; lse `[B, Hq, Lq]`,
        contiguous, natural log, float32 (float64 for float64 inputs). A row with nothing to attend to has out 0 and
        lse -inf.

    Raises:
        ArgumentError: shapes, dtypes, devices, scale or segments that do not fit.
        ArgumentTypeError: an argument of the wrong type.
        UnsupportedError: `force_backend` names a kernel that cannot do this.

    Source: FlashAttention-2, Dao, arXiv 2307.08691, for the log-sum-exp; its merge is `partsong.kernels.merge`.
    """
    check_qkv(q, k, v)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[3]) if q.shape[3] else 1.0
    elif not math.isfinite(scale):
        raise ArgumentError(f"attention needs a finite scale, found {scale}")
    if segments is None:
        if mask is None and bias is None:
            result = _compute(q, k, v, None, scale)
        else:
            result = _compute(q, k, v, additive(q, k, mask, bias, None), scale)
    else:
        runs = check_runs(segments, k.shape[2])
        if q.is_cuda:
            result = _by_run(q, k, v, additive(q, k, mask, bias, None), scale, runs)
        else:
            result = _compute(q, k, v, additive(q, k, mask, bias, runs), scale)
    return result if init is None else merge([init, result])


def _compute(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    if not (k.shape[2] and q.shape[2] and q.shape[1] and q.shape[0]):
        return torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=compute_dtype(q.dtype), device=q.device)
    return choose(q, k, v, bias).run(q, k, v, bias, scale)


def _by_run(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, runs: Sequence[Run]
) -> tuple[Tensor, Tensor]:
    """Runs computed apart, their bias added to their log-sum-exp, then merged.

    The CUDA kernels take a bias only in q's dtype, where bfloat16 would round ln r; this way it stays float32, a run
    needs no bias tensor, and k and v are read as views.
    """
    parts, start = [], 0
    for length, logit in runs:
        here = slice(start, start + length)
        start += length
        if logit != -math.inf:
            local = bias if bias is None or bias.shape[3] == 1 else bias[..., here]
            out, lse = _compute(q, k[:, :, here], v[:, :, here], local, scale)
            parts.append((out, lse + logit))
    return merge(parts) if parts else _compute(q, k[:, :, :0], v[:, :, :0], None, scale)
