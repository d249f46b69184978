"""Specifies `partsong.kernels.norms` in plain torch, which runs everywhere.

Every function takes arguments that `norms` has checked and brought to one form, computes in float32 (float64 as soon
as one tensor is float64) and rounds once, at the end. `norms_triton` and `token_norms_triton` hold functions of the
same names and arguments and must agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = [
    "accumulator",
    "adaptive_layer_norm",
    "corrected_group_norm_stats",
    "group_norm_apply",
    "group_norm_stats",
    "merge_group_norm_stats",
    "residual_adaptive_layer_norm",
    "rms_norm_rotary",
]


def accumulator(*tensors: Tensor | None) -> torch.dtype:
    """Returns the dtype these tensors are computed in: float64 if one of them is float64, else float32."""
    return torch.float64 if any(x is not None and x.dtype is torch.float64 for x in tensors) else torch.float32


def group_norm_stats(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Returns mean and biased variance `[B, G]` of x `[B, C, ...]`; both are 0 where a group has no elements."""
    size = math.prod(x.shape[1:]) // num_groups
    groups = x.to(accumulator(x)).reshape(x.shape[0], num_groups, size)
    if not groups.numel():
        return groups.new_zeros(groups.shape[:2]), groups.new_zeros(groups.shape[:2])
    var, mean = torch.var_mean(groups, dim=2, correction=0)
    return mean, var


def merge_group_norm_stats(
    counts: Sequence[int], means: Sequence[Tensor], variances: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns mean and variance `[B, G]` of the whole out of each patch's: a few numbers, so nothing is fused."""
    # A patch without elements is left out: its statistics may be NaN, which a weight of 0 would not remove.
    filled = [index for index, count in enumerate(counts) if count]
    dtype = accumulator(*means, *variances)
    mean = torch.stack([means[index].to(dtype) for index in filled])
    var = torch.stack([variances[index].to(dtype) for index in filled])
    shares = _shares(tuple(counts[index] for index in filled), dtype, mean.device)
    # Only differences of means are averaged: they stay small where the means are large.
    whole = mean[0] + (shares * (mean - mean[0])).sum(dim=0)
    spread = (shares * (var + (mean - whole).square())).sum(dim=0)
    return whole.to(means[0].dtype), spread.to(means[0].dtype)


@lru_cache(maxsize=64)
def _shares(counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns each patch's share of the whole, `[P, 1, 1]`; kept, because building it makes the host wait."""
    with torch.inference_mode(False):  # a tensor made in inference mode could not be used outside it
        shares = [count / sum(counts) for count in counts]
        return torch.tensor(shares, dtype=dtype, device=device).view(-1, 1, 1)


def corrected_group_norm_stats(
    stale_all: tuple[Tensor, Tensor], own_stale: tuple[Tensor, Tensor], own_fresh: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Moves mean and mean square of the whole by the change of the own patch's.

    var = (var_all + mean_all^2) + (var_fresh + mean_fresh^2) - (var_stale + mean_stale^2) - mean^2 is multiplied out,
    so that no large squares cancel: var_all + (var_fresh - var_stale) + 2 change (mean_stale - mean_all).
    """
    dtype = accumulator(*stale_all, *own_stale, *own_fresh)
    mean, var = (stat.to(dtype) for stat in stale_all)
    (stale, stale_var), (fresh, fresh_var) = ([stat.to(dtype) for stat in pair] for pair in (own_stale, own_fresh))
    change = fresh - stale
    corrected = var + (fresh_var - stale_var) + 2 * change * (stale - mean)
    kept = torch.where(corrected < 0, fresh_var, corrected)
    return (mean + change).to(stale_all[0].dtype), kept.to(stale_all[0].dtype)


def group_norm_apply(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalises x `[B, C, ...]` by mean and var `[B, G]`: (x - mean) / sqrt(var + eps) * weight `[C]` + bias `[C]`."""
    dtype = accumulator(x, mean, var, weight, bias)
    spatial = (1,) * (x.dim() - 2)
    channels = x.shape[1]
    mean, var = (
        stat.to(dtype).repeat_interleave(channels // stat.shape[1], dim=1).view(x.shape[0], channels, *spatial)
        for stat in (mean, var)
    )
    out = (x.to(dtype) - mean) * torch.rsqrt(var + eps)
    if weight is not None:
        out = out * weight.to(dtype).view(1, channels, *spatial)
    if bias is not None:
        out = out + bias.to(dtype).view(1, channels, *spatial)
    return out.to(x.dtype)


def adaptive_layer_norm(
    x: Tensor, shift: Tensor | None, scale: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Returns (1 + scale) * (n * weight + bias) + shift, with n the layer norm of x `[B, L, C]`."""
    dtype = accumulator(x, shift, scale, weight, bias)
    wide = x.to(dtype)
    centred = wide - wide.mean(dim=2, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(dim=2, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.to(dtype)
    if bias is not None:
        out = out + bias.to(dtype)
    if scale is not None:
        out = out * (1 + scale.to(dtype))
    if shift is not None:
        out = out + shift.to(dtype)
    return out.to(x.dtype)


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
    """Returns the stream, residual + gate * x rounded to residual's dtype, and its adaptive layer norm."""
    dtype = accumulator(x, residual, gate)
    update = x.to(dtype) if gate is None else gate.to(dtype) * x.to(dtype)
    stream = (residual.to(dtype) + update).to(residual.dtype)
    return stream, adaptive_layer_norm(stream, shift, scale, weight, bias, eps)


def rms_norm_rotary(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    norm: str | None,
    eps: float,
) -> Tensor:
    """Applies RMS norm, then rotary embedding, to x `[B, L, H, D]`; cos and sin `[B or 1, L, 1, D or D/2]`."""
    dtype = accumulator(x, weight, cos, sin)
    out = x.to(dtype)
    if norm is not None:
        dims = (3,) if norm == "head" else (2, 3)
        out = out * torch.rsqrt(out.square().mean(dim=dims, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.to(dtype).view(-1, x.shape[3])
    if cos is not None and sin is not None:
        cos, sin = (_full_width(table.to(dtype), x.shape[3], interleaved) for table in (cos, sin))
        out = out * cos + _quarter_turn(out, interleaved) * sin
    return out.to(x.dtype)


def _full_width(table: Tensor, width: int, interleaved: bool) -> Tensor:
    if table.shape[3] == width:
        return table
    return table.repeat_interleave(2, dim=3) if interleaved else torch.cat((table, table), dim=3)


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Turns every pair (a, b) to (-b, a); pairs are neighbours, or element i of both halves."""
    if interleaved:
        first, second = x.unflatten(3, (-1, 2)).unbind(dim=4)
        return torch.stack((-second, first), dim=4).flatten(3)
    first, second = x.chunk(2, dim=3)
    return torch.cat((-second, first), dim=3)
