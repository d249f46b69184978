"""Compares what a kernel wrote into fresh memory with float64, where fresh memory is full of NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["TOLERANCE", "distance", "poisoned", "widened"]

#: Largest difference, relative to the largest number of the result, by the type of the inputs.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills all fresh memory with NaN within a block, as torch does here, so that what nobody writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def widened(x: Tensor) -> Tensor:
    """Returns float numbers in float64, and others as they are."""
    return x.double() if x.is_floating_point() else x


def distance(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Returns the largest difference of two results, each tensor's relative to its largest number; NaN for a NaN.

    Whole numbers, such as tokens, have to be the same: where one is not, the difference is infinite.
    """
    worst = torch.zeros((), dtype=torch.float64)
    for one, two in zip(got, want, strict=True):
        assert one.shape == two.shape, f"shapes {tuple(one.shape)} and {tuple(two.shape)}"
        if not two.is_floating_point() and not torch.equal(one, two):
            return math.inf
        one, two = one.double().cpu(), two.double().cpu()
        scale = two[torch.isfinite(two)].abs().amax().clamp(min=1e-30) if torch.isfinite(two).any() else 1.0
        # Equal infinities are no difference: their own would be NaN.
        apart = torch.where(one == two, 0.0, (one - two).abs()) / scale
        worst = torch.maximum(worst, apart.amax()) if apart.numel() else worst  # maximum keeps NaN
    return worst.item()
