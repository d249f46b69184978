"""Shares the samples of a batch out over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from partsong.knobs import Count
from partsong.parallel.strategy import Strategy

__all__ = ["DataParallel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallel(Strategy):
    """Shares the samples of a batch out over ranks, for the denoiser and the decoder. Exact.

    Give the pipeline several prompts or ``num_images_per_prompt``; there may be fewer samples than ranks.

    Use it when there are several pictures to make and it does not matter how long each one takes.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
    """

    axes: ClassVar[tuple[str, ...]] = ("data",)
    passes_gradients: ClassVar[bool] = True

    degree: Count | None = None
