"""Finds the weights of a sum, and says whether two tensors are equal up to rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["close", "fitted", "slack", "weight_slack"]

#: Sums of numbers around 1 agree to this many units of rounding. Many schedulers and pipelines compute in float32,
#: whatever the type of their latents.
_ROUNDINGS, _COARSE = 60, torch.finfo(torch.float32).eps
#: The same for their average.
_AVERAGED = 10


def fitted(parts: Sequence[Tensor], wanted: Tensor) -> list[float]:
    """Returns the weights with which independent parts come closest to a target.

    The parts are few and random, so their Gram matrix is well conditioned, and Gaussian elimination needs no pivots.
    """
    rows = [[float((a * b).sum()) for b in (*parts, wanted)] for a in parts]
    for place, row in enumerate(rows):
        for other in rows[:place] + rows[place + 1 :]:
            factor = other[place] / row[place]
            other[:] = [value - factor * above for value, above in zip(other, row, strict=True)]
    return [row[-1] / row[place] for place, row in enumerate(rows)]


def slack(like: Tensor) -> float:
    """Returns how far numbers around 1 may differ by rounding."""
    return _ROUNDINGS * max(torch.finfo(like.dtype).eps, _COARSE)


def close(one: Tensor, other: Tensor, like: Tensor) -> bool:
    """Says whether two tensors are equal up to rounding."""
    if one.shape != other.shape:
        return False
    apart, size = (one.double() - other.double()).abs().max(), other.double().abs().max()
    return bool(torch.isfinite(apart)) and float(apart) <= slack(like) * max(1.0, float(size))


def weight_slack(parts: Sequence[Tensor]) -> float:
    """Returns how far fitted weights around 1 may differ by the rounding of the parts: it evens out over their numbers.

    A model may compute in half precision beside latents in float32, as Wan's does.
    """
    return max(_ROUNDINGS * _COARSE, *(_AVERAGED * torch.finfo(part.dtype).eps / part.numel() ** 0.5 for part in parts))
