"""Notices where a generation stops being made of numbers: a NaN becomes a black picture, and nobody says why."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["FiniteWatch"]

logger = logging.getLogger("partsong.parallel")


class FiniteWatch:
    """Measures the results of a generation, and names the first that is NaN or infinite in one warning.

    The sizes stay where they are computed and are read once, by `report`, so the host waits for no step.

    >>> watch = FiniteWatch()
    >>> watch.look(torch.zeros(2), "at step 1 of 2")
    >>> watch.report()
    """

    def __init__(self) -> None:
        self._sizes: list[Tensor] = []
        self._places: list[str] = []

    def look(self, result: Any, place: str) -> None:
        """Measures a result: a tensor, or what holds one at its beginning as schedulers and models return it."""
        sample = _first_of(result)
        if isinstance(sample, Tensor) and sample.is_floating_point() and sample.numel() and not sample.is_meta:
            # The largest number is NaN where one is, and needs no memory for a flag of each.
            self._sizes.append(torch.linalg.vector_norm(sample.detach(), math.inf))
            self._places.append(place)

    def report(self) -> None:
        """Ends a generation, or a part of one, and says where it went wrong."""
        sizes, places = self._sizes, self._places
        self._sizes, self._places = [], []
        # In one type, since float16 may not hold another's.
        numbers = torch.stack([size.to(sizes[0].device, torch.float64) for size in sizes]).tolist() if sizes else []
        bad = next((place for place, size in zip(places, numbers, strict=True) if not math.isfinite(size)), None)
        if bad is not None:
            logger.warning(
                "NaN or infinite numbers came up %s, so the result shows nothing: look for such numbers in the weights "
                "and the arguments, or use bfloat16 or float32 if float16 overflowed",
                bad,
            )


def _first_of(result: Any) -> Any:
    values = tuple(result.values()) if isinstance(result, dict) else result  # outputs of diffusers are dictionaries
    return values[0] if isinstance(values, (tuple, list)) and values else values
