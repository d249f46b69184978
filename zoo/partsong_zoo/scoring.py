"""Scores pipelines for the zoo's tasks: samples fresh captions in batches, and counts the facts that hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__all__ = ["FactScore", "sample"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FactScore:
    """Holds facts read back from what a pipeline made.

    Attributes:
        captions: The captions.
        facts: For each caption its facts, and whether each holds.
    """

    captions: list[str]
    facts: list[dict[str, bool]]

    @property
    def facts_read(self) -> float:
        """Returns the fraction of all facts of all captions that hold."""
        return float(np.mean([held for row in self.facts for held in row.values()]))

    @property
    def all_right(self) -> float:
        """Returns the fraction of captions all of whose facts hold."""
        return float(np.mean([all(row.values()) for row in self.facts]))

    @property
    def standard_error(self) -> float:
        """Returns the standard error, over captions, of the fraction of a caption's facts that hold."""
        shares = [float(np.mean([*row.values()])) for row in self.facts]
        return float(np.std(shares, ddof=1) / len(shares) ** 0.5)

    def report(self) -> dict[str, Any]:
        """Returns the measures as a flat row, rounded: ``facts_read all_right by_kind``."""
        return {
            "facts_read": round(self.facts_read, 4),
            "all_right": round(self.all_right, 4),
            "by_kind": {kind: [round(share, 4), count] for kind, (share, count) in self.by_kind().items()},
        }

    def by_kind(self) -> dict[str, tuple[float, int]]:
        """Returns for each kind of fact, such as `count` or `colour`, the fraction that holds and their number."""
        kinds: dict[str, list[bool]] = {}
        for row in self.facts:
            for name, held in row.items():
                kinds.setdefault(name.split(":")[0], []).append(held)
        return {kind: (float(np.mean(held)), len(held)) for kind, held in kinds.items()}


def sample(
    pipeline: DiffusionPipeline,
    captions: Sequence[str],
    take: Callable[[Any], NDArray[np.float32]],
    *,
    seed: int,
    batch: int,
    **arguments: Any,
) -> NDArray[np.float32]:
    """Samples something for each caption; sample i has a generator of its own, seeded `seed + i`.

    Args:
        pipeline: Any text-to-something pipeline.
        captions: One per sample.
        take: Turns what the pipeline returned into an array `[batch, ...]`.
        seed: Seeds the noise.
        batch: Captions per call.
        **arguments: Passed to the pipeline's call.
    """
    import torch

    call: Any = pipeline  # the base class has no call, but every text-to-something pipeline has one
    parts = []
    for first in range(0, len(captions), batch):
        texts = list(captions[first : first + batch])
        noise = [torch.Generator().manual_seed(seed + first + index) for index in range(len(texts))]
        parts.append(np.asarray(take(call(texts, generator=noise, output_type="np", **arguments))))
    return np.concatenate(parts)
