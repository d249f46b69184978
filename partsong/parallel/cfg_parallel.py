"""Computes guidance branches on different ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from partsong.knobs import Count
from partsong.parallel.strategy import Strategy

__all__ = ["CfgParallel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CfgParallel(Strategy):
    """Computes the conditional and the unconditional branch of classifier-free guidance on two ranks. Exact.

    Where the pipeline batches the branches, the batch is shared out. Where it calls the model once per branch, every
    rank computes all branches in the first step, and only its own from the second on (see `GuidancePair`). Moves one
    sample per step.

    Use it when guidance is on and the number of ranks is even, on any link and before any other.

    Args:
        degree: number of ranks; None takes the ranks that other strategies leave, or 2 if another strategy leaves its
            degree open too.

    Source: Classifier-Free Diffusion Guidance, arXiv 2207.12598.
    """

    axes: ClassVar[tuple[str, ...]] = ("cfg",)
    expects_calls: ClassVar[bool] = True
    passes_gradients: ClassVar[bool] = True

    degree: Count | None = None
