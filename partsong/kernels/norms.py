"""Computes the small fused operations of diffusion models: norms with what comes right before or after them.

On CUDA a Triton kernel reads every tensor once; elsewhere, for float64 and where a gradient is needed, the plain
version of `norms_naive` computes the same. Triton is imported by the first call that uses it.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.kernels import norms_cpu, norms_naive
from partsong.kernels.call import triton_refusal
from partsong.kernels.masks import describe

__all__ = [
    "adaptive_layer_norm",
    "corrected_group_norm_stats",
    "group_norm_apply",
    "group_norm_stats",
    "merge_group_norm_stats",
    "residual_adaptive_layer_norm",
    "rms_norm_rotary",
]

_LOG = logging.getLogger("partsong.kernels")
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def group_norm_stats(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Computes mean and biased variance of every group of channels, as group norm takes them, in one pass.

    No digits are lost where the mean is large compared with the spread, as they are in E[x^2] - E[x]^2.

    Args:
        x: `[B, C, ...]`; contiguous and channels-last tensors and slices of rows are read in place.
        num_groups: G, which divides C; a group is C/G neighbouring channels with all their positions.

    Returns:
        (mean, var), each `[B, G]`, float32 (float64 for float64 x). A group without elements, such as the patch of a
        rank that got no rows, has mean 0 and var 0.

    Raises:
        ArgumentError: x has fewer than two dims, or num_groups does not divide C.
        ArgumentTypeError: x is not a float tensor or num_groups no integer.

    Source: Welford, Technometrics 4 (1962), merged as in Chan, Golub and LeVeque, STAN-CS-79-773.
    """
    _check("x", x)
    groups = _integer("num_groups", num_groups)
    if x.dim() < 2 or groups < 1 or x.shape[1] % groups:
        raise ArgumentError(
            f"group norm needs x [B, C, ...] and a number of groups that divides C; "
            f"found x {tuple(x.shape)} and {groups} groups"
        )
    return _implementation("norms_triton", x).group_norm_stats(x, groups)


def merge_group_norm_stats(
    counts: Sequence[int], means: Sequence[Tensor], variances: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Combines the statistics of patches into those of the whole, so that ranks can share theirs exactly.

    Args:
        counts: elements (or rows) per group in each patch; uneven ones and zeros are fine.
        means: one `[B, G]` per patch, or all stacked `[P, B, G]`.
        variances: biased, as `means`.

    Returns:
        (mean, var) of the whole, each `[B, G]` in the dtype of the first mean.

    Raises:
        ArgumentError: no elements at all, a negative count, or lengths, shapes or devices that differ.
        ArgumentTypeError: a count is not an integer, or a statistic not a float tensor.

    Source: Chan, Golub and LeVeque, STAN-CS-79-773.
    """
    sizes = tuple(_integer("every count", n) for n in counts)
    if not len(sizes) == len(means) == len(variances) or min(sizes, default=0) < 0 or not sum(sizes):
        raise ArgumentError(
            f"merging needs one count >= 0, one mean and one variance per patch and at least one element; "
            f"found counts {sizes}, {len(means)} means, {len(variances)} variances"
        )
    _check_stats("every statistic", (*means, *variances), means[0])
    return norms_naive.merge_group_norm_stats(sizes, means, variances)


def corrected_group_norm_stats(
    stale_all: tuple[Tensor, Tensor], own_stale: tuple[Tensor, Tensor], own_fresh: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Corrects the previous step's whole-image statistics by how this rank's own patch has changed since.

    The means of x and of x^2 of the whole are each taken as stale_all + (own_fresh - own_stale). Where the variance
    that follows is negative, the own fresh variance is used instead. With one patch this gives own_fresh.

    Args:
        stale_all: (mean, var) of the whole at the previous step, each `[B, G]`, biased.
        own_stale: (mean, var) of the own patch at the previous step.
        own_fresh: (mean, var) of the own patch now.

    Returns:
        (mean, var), each `[B, G]`.

    Raises:
        ArgumentError: shapes or devices that differ.
        ArgumentTypeError: an argument is not a pair of float tensors.

    Source: DistriFusion, Li et al., arXiv 2402.19481, section 4.
    """
    for name, pair in (("stale_all", stale_all), ("own_stale", own_stale), ("own_fresh", own_fresh)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ArgumentTypeError(f"{name} is a pair (mean, var), found {type(pair).__name__}")
        _check_stats(name, pair, stale_all[0])
    return norms_naive.corrected_group_norm_stats(stale_all, own_stale, own_fresh)


def group_norm_apply(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalises x by given statistics: `(x - mean) / sqrt(var + eps) * weight + bias`.

    Args:
        x: `[B, C, ...]`, any strides.
        mean: `[B, G]`, where G divides C; of the whole image, of a patch, or stale.
        var: `[B, G]`, biased, not negative.
        weight: `[C]` or None.
        bias: `[C]` or None.
        eps: added to var; torch's group norm has 1e-5, the autoencoders of diffusers have 1e-6.

    Returns:
        x's shape and dtype, and its memory layout where that has no gaps.

    Raises:
        ArgumentError: shapes, devices or an eps that do not fit.
        ArgumentTypeError: an argument is not a float tensor.

    Source: Wu and He, arXiv 1803.08494.
    """
    _check("x", x)
    _check_stats("mean and var", (mean, var), mean)
    _check_eps(eps)
    if x.dim() < 2 or mean.shape[0] != x.shape[0] or not mean.shape[1] or x.shape[1] % mean.shape[1]:
        raise ArgumentError(
            f"group norm needs x [B, C, ...] with mean and var [B, G], where G divides C; "
            f"found x {tuple(x.shape)}, mean and var {tuple(mean.shape)}"
        )
    _check("mean", mean, like=x)
    _check_vector("weight", weight, x.shape[1], x)
    _check_vector("bias", bias, x.shape[1], x)
    given = (x, mean, var, weight, bias)
    return _implementation("norms_triton", *given).group_norm_apply(*given, eps)


def adaptive_layer_norm(
    x: Tensor,
    shift: Tensor | None,
    scale: Tensor | None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Applies layer norm over the channels, then modulation: `(1 + scale) * n + shift`.

    Args:
        x: tokens `[B, L, C]`.
        shift: `[B, C]` (DiT, SD3, Flux), `[B, 1, C]` (PixArt, Wan 2.1) or `[B, L, C]` (Wan 2.2, one per token); a B
            of 1 broadcasts. None adds nothing.
        scale: as shift.
        weight: `[C]`, the norm's own weight, applied before the modulation, or None.
        bias: `[C]`, the norm's own bias, or None.
        eps: added to the variance; 1e-6 in DiT, PixArt, SD3, Flux and Wan.

    Returns:
        `[B, L, C]` in x's dtype, computed in float32 (float64 if a tensor is float64) and rounded once.

    Raises:
        ArgumentError: shapes, devices or an eps that do not fit.
        ArgumentTypeError: an argument is not a float tensor.

    Source: adaLN of DiT, Peebles and Xie, arXiv 2212.09748, section 3.2.
    """
    given = (x, *_check_adaptive(x, shift, scale, weight, bias, eps), weight, bias)
    return _implementation("token_norms_triton", *given, row=x.shape[2]).adaptive_layer_norm(*given, eps)


def residual_adaptive_layer_norm(
    x: Tensor,
    residual: Tensor,
    gate: Tensor | None,
    shift: Tensor | None,
    scale: Tensor | None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Joins two parts of a block: `stream = residual + gate * x`, then the stream's adaptive layer norm.

    Args:
        x: output of attention or feed-forward, `[B, L, C]`.
        residual: the stream it is added to, `[B, L, C]`.
        gate: shapes as shift of `adaptive_layer_norm`; None adds x as it is (Wan's cross attention).
        shift: that of the norm that follows, as in `adaptive_layer_norm`.
        scale: as shift.
        weight: `[C]`, the following norm's own weight, or None.
        bias: `[C]`, the following norm's own bias, or None.
        eps: added to the variance.

    Returns:
        (stream, normed), each `[B, L, C]` in residual's dtype. The norm sees the stream as rounded to that dtype, as
        it does in the models.

    Raises:
        ArgumentError: shapes, devices or an eps that do not fit.
        ArgumentTypeError: an argument is not a float tensor.

    Source: adaLN-Zero of DiT, Peebles and Xie, arXiv 2212.09748, section 3.2.
    """
    shift, scale = _check_adaptive(x, shift, scale, weight, bias, eps)
    _check("residual", residual, like=x)
    if residual.shape != x.shape:
        raise ArgumentError(f"x and residual need one shape; found {tuple(x.shape)} and {tuple(residual.shape)}")
    given = (x, residual, _modulation("gate", gate, x), shift, scale, weight, bias)
    return _implementation("token_norms_triton", *given, row=x.shape[2]).residual_adaptive_layer_norm(*given, eps)


def rms_norm_rotary(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    interleaved: bool,
    norm: Literal["head", "token"] | None = "head",
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Applies RMS norm to queries and keys, then rotary embedding.

    Args:
        q: `[B, L, H, D]`.
        k: `[B, Lk, Hk, D]`; Lk = L where there are tables.
        q_weight: `[D]`, with norm "token" `[H * D]`; None for a norm without weight.
        k_weight: `[D]`, with norm "token" `[Hk * D]`, or None.
        cos: `[L, D]` (Flux), `[1, L, 1, D]` (Wan) or one per sample `[B, L, 1, D]`; with D/2 columns each counts for
            both elements of its pair. None, with sin None, for no rotary embedding.
        sin: as cos.
        interleaved: True where pairs are neighbours (2i, 2i + 1): Flux, Wan, CogVideoX. False where they are element
            i of both halves (i, i + D/2): CogView4, Cosmos, OmniGen, Llama.
        norm: "head": over the D channels of every head (Flux, SD3, Qwen). "token": over the channels of all heads of
            a token (Wan, LTX), so only where a rank holds all heads. None: no norm.
        eps: added to the mean square; 1e-6 in Flux, SD3 and Wan.

    Returns:
        (q, k) with shapes and dtypes kept, computed in float32 (float64 if a tensor is float64) and rounded once.

    Raises:
        ArgumentError: shapes, devices or an eps that do not fit, an odd D with tables, a weight without a norm.
        ArgumentTypeError: an argument is not a float tensor, or only one of cos and sin is given.

    Source: RMSNorm, Zhang and Sennrich, arXiv 1910.07467; RoFormer, Su et al., arXiv 2104.09864.
    """
    _check_eps(eps)
    if norm not in ("head", "token", None):
        raise ArgumentError(f"norm is 'head', 'token' or None, found {norm!r}")
    runs = []
    for name, x, weight in (("q", q, q_weight), ("k", k, k_weight)):
        row = _check_heads(name, x, weight, norm)
        given = (x, weight, *_tables(cos, sin, name, x))
        fused = _implementation("token_norms_triton", *given, row=row).rms_norm_rotary
        runs.append(partial(fused, *given, interleaved, norm, eps))
    return runs[0](), runs[1]()


def _implementation(fused: str, *tensors: Tensor | None, row: int = 1) -> ModuleType:
    """Picks the Triton module `fused` where it can compute these tensors and rows of this length; else a plain one."""
    given = [x for x in tensors if x is not None]
    ok, reason = False, triton_refusal(given[0].device)
    if not reason:
        ok, reason = import_module("partsong.kernels.norms_triton").supports(given, row)
    _log_once(fused, ok, reason)
    if ok:
        return import_module(f"partsong.kernels.{fused}")
    # On a CPU the token norms gain nothing from torch's own passes.
    return norms_cpu if fused == "norms_triton" and norms_cpu.supports(*given) else norms_naive


@cache
def _log_once(fused: str, ok: bool, reason: str) -> None:
    _LOG.debug("%s %s: %s", fused, "used" if ok else "not used", reason)


def _check(name: str, x: Tensor | None, *, like: Tensor | None = None) -> Tensor:
    if not isinstance(x, Tensor) or x.dtype not in _FLOATS:
        raise ArgumentTypeError(f"{name} is a tensor of float16, bfloat16, float32 or float64, found {describe(x)}")
    if like is not None and x.device != like.device:
        raise ArgumentError(f"{name} is on {x.device}, the first tensor on {like.device}: move them to one device")
    return x


def _check_eps(eps: float) -> None:
    if not (isinstance(eps, int | float) and 0 <= eps < math.inf):
        raise ArgumentError(f"eps is a finite number of at least 0, found {eps!r}")


def _integer(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise ArgumentTypeError(f"{name} is an integer, found {value!r}") from error


def _check_stats(name: str, stats: Sequence[Tensor], like: Tensor) -> None:
    for stat in stats:
        _check(name, stat, like=like)
        if stat.dim() != 2 or stat.shape != like.shape:
            raise ArgumentError(f"{name} needs one shape [B, G]; found {tuple(like.shape)} and {tuple(stat.shape)}")


def _check_vector(name: str, vector: Tensor | None, size: int, x: Tensor) -> None:
    if vector is not None:
        _check(name, vector, like=x)
        if vector.shape != (size,):
            raise ArgumentError(f"{name} needs shape [{size}] for x {tuple(x.shape)}, found {tuple(vector.shape)}")


def _check_adaptive(
    x: Tensor, shift: Tensor | None, scale: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor | None, Tensor | None]:
    """Checks the arguments that the adaptive norms share; gives shift and scale three dims."""
    _check("x", x)
    _check_eps(eps)
    if x.dim() != 3:
        raise ArgumentError(f"adaptive layer norm needs x [B, L, C], found {tuple(x.shape)}")
    _check_vector("weight", weight, x.shape[2], x)
    _check_vector("bias", bias, x.shape[2], x)
    return _modulation("shift", shift, x), _modulation("scale", scale, x)


def _modulation(name: str, given: Tensor | None, x: Tensor) -> Tensor | None:
    """Returns `given` as `[B or 1, L or 1, C]`."""
    if given is None:
        return None
    _check(name, given, like=x)
    wide = given.unsqueeze(1) if given.dim() == 2 else given
    fits = wide.dim() == 3 and wide.shape[2] == x.shape[2]
    if not fits or any(n not in (1, m) for n, m in zip(wide.shape, x.shape, strict=True)):
        raise ArgumentError(
            f"{name} needs shape [B, C], [B, 1, C] or [B, L, C] (or 1 for B) for x {tuple(x.shape)}; "
            f"found {tuple(given.shape)}"
        )
    return wide


def _check_heads(name: str, x: Tensor, weight: Tensor | None, norm: str | None) -> int:
    """Checks queries or keys and their weight; returns over how many channels the norm goes."""
    _check(name, x)
    if x.dim() != 4 or not x.shape[3]:
        raise ArgumentError(f"rms_norm_rotary needs {name} [B, L, H, D] with D at least 1, found {tuple(x.shape)}")
    if weight is not None and norm is None:
        raise ArgumentError(f"{name}_weight is given but norm is None: leave the weight out or name the norm")
    row = x.shape[3] * (x.shape[2] if norm == "token" else 1)
    _check_vector(f"{name}_weight", weight, row, x)
    return row


def _tables(cos: Tensor | None, sin: Tensor | None, name: str, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns both tables as `[B or 1, L, 1, D or D/2]`, checked against x, which is called `name`."""
    if cos is None and sin is None:
        return None, None
    cos, sin = _check("cos", cos, like=x), _check("sin", sin, like=x)
    wide = cos[None, :, None] if cos.dim() == 2 else cos
    batch, length, _, width = x.shape
    fits = wide.dim() == 4 and wide.shape[0] in (1, batch) and wide.shape[1:3] == (length, 1)
    if not fits or width % 2 or wide.shape[3] not in (width, width // 2) or sin.shape != cos.shape:
        raise ArgumentError(
            f"cos and sin need one shape, [L, D], [L, D/2] or [B or 1, L, 1, D or D/2], and D even, for {name} "
            f"{tuple(x.shape)}; found cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        )
    return wide, sin.view(wide.shape)
