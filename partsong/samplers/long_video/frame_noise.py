"""Draws the initial noise of a long video: each frame's depends only on the seed and the frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partsong import seeds

__all__ = ["FrameNoise", "draw_seeds"]

#: Upper bound of drawn seeds.
_SEEDS = 1 << 62


def draw_seeds(generator: Any) -> list[int]:
    """Draws a seed from each of the generators that a pipeline's call was given.

    Args:
        generator: a `torch.Generator`, one per sample, or None for torch's default one.
    """
    each = list(generator) if isinstance(generator, (list, tuple)) else [generator]
    return [int(torch.randint(_SEEDS, (1,), generator=g, device=getattr(g, "device", None)).item()) for g in each]


class FrameNoise:
    """Draws the noise of blocks of latent frames.

    ``independent`` draws every frame for itself. ``pool`` draws a few frames once, and every block takes them in an
    order of its own, without those that its context already holds: neighbours start from shared noise, which keeps
    a long video coherent, and no window sees a frame's noise twice (FreeNoise, arXiv 2310.15169; DualParal, arXiv
    2505.21070).

    Args:
        drawn: a seed per sample, or one that the samples' seeds are derived from.
        frames: latent frames of every block; the last may have fewer.
        context: frames of the block before that a window holds.
        kind: ``pool`` or ``independent``.

    Example:
        >>> noise = FrameNoise([7], frames=4, context=2, kind="pool")
        >>> first, second = noise.numbers(0), noise.numbers(1)
        >>> len(set(second)), set(first[-2:]) & set(second)
        (4, set())
    """

    def __init__(self, drawn: Sequence[int], *, frames: int, context: int, kind: str) -> None:
        self.drawn, self.frames, self.context, self.kind = list(drawn), frames, min(context, frames), kind
        self._newest, self._order = -1, list[int]()

    def numbers(self, block: int) -> tuple[int, ...]:
        """Returns the number of the noise frame from which each frame of a block starts."""
        if self.kind == "independent":
            return tuple(range(block * self.frames, (block + 1) * self.frames))
        if self._newest > block:
            self._newest, self._order = -1, []
        for number in range(self._newest + 1, block + 1):
            kept = self._order[max(0, len(self._order) - self.context) :]
            free = [n for n in range(self.frames + self.context) if n not in kept]
            keys = seeds.uniform(seeds.derive(self.drawn[0], "order", number), (len(free),), dtype=torch.float64)
            self._newest, self._order = number, [free[i] for i in keys.argsort().tolist()][: self.frames]
        return tuple(self._order)

    def like(self, latents: Tensor, dim: int, block: int) -> Tensor:
        """Returns the noise of a block.

        Args:
            latents: a tensor of the shape, type and device to return, with a sample for each seed.
            dim: the dim of its frames.
            block: number of the block.
        """
        numbers = self.numbers(block)[: latents.shape[dim]]
        samples = self.drawn if len(self.drawn) > 1 else seeds.for_images(self.drawn[0], len(latents))
        shape = [size for d, size in enumerate(latents.shape) if d not in (0, dim)]
        parts = [
            torch.stack([seeds.noise(seeds.derive(seed, "frame", number), shape) for number in numbers], dim=dim - 1)
            for seed in samples
        ]
        return torch.stack(parts).to(device=latents.device, dtype=latents.dtype)
