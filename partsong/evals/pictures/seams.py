"""Measures whether a picture shows where the parts that it was painted in meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["seams"]


def seams(image: Image.Image, factor: int) -> float | None:
    """Measures how much more neighbouring pixels differ where training sizes meet than elsewhere: 1 without seams.

    Args:
        image: a picture of several times the training size.
        factor: how many times.

    Returns:
        None for a picture of the training size, in which none meet.

    Example:
        >>> from PIL import Image
        >>> noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        >>> 0.9 < seams(Image.fromarray(noise), 2) < 1.1
        True
    """
    if factor == 1:
        return None
    pixels = np.asarray(image, dtype=np.float64)
    inside, across = [], []
    for axis in (0, 1):
        jumps = np.abs(np.diff(pixels, axis=axis)).mean(axis=(1 - axis, 2))
        meets = (np.arange(len(jumps)) + 1) % (pixels.shape[axis] // factor) == 0
        inside.append(jumps[~meets])
        across.append(jumps[meets])
    return float(np.concatenate(across).mean() / np.concatenate(inside).mean())
