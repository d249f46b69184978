"""Measures how close frames are to others, and how much a video flickers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partsong.evals.pictures.shelf import Frames
from partsong.outputs import psnr

__all__ = ["SMALLEST", "as_batch", "flicker", "psnrs", "ssims"]

#: The window of SSIM is 11 pixels wide, so smaller pictures have none.
SMALLEST = 11


def as_batch(frames: Frames) -> Tensor:
    """Returns frames `[F, H, W, 3]` as a float32 tensor `[F, 3, H, W]` in [0, 1]."""
    return torch.from_numpy(frames).float().clamp(0.0, 1.0).movedim(-1, 1)


def psnrs(frames: Frames, reference: Frames) -> list[float]:
    """Returns the PSNR of each frame in dB, on values in [0, 1] before any rounding; infinite where two are equal."""
    return [psnr(one, other) for one, other in zip(frames, reference, strict=True)]


def ssims(frames: Frames, reference: Frames) -> list[float]:
    """Returns the structural similarity of each frame, with a Gaussian window of 11 pixels.

    Source: Wang et al. 2004, as torchmetrics computes it: per colour, with pictures reflected at their edges.

    Returns:
        A number at most 1 for each frame; none at all where a side has fewer than 11 pixels.

    Example:
        >>> import numpy as np
        >>> picture = np.random.default_rng(0).random((1, 16, 16, 3))
        >>> ssims(picture, picture)
        [1.0]
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    if min(frames.shape[1:3]) < SMALLEST:
        return []
    # In 32 bits, variances of flat areas are mostly rounding.
    pairs = zip(as_batch(frames).double(), as_batch(reference).double(), strict=True)
    compare: Any = structural_similarity_index_measure
    return [float(compare(a[None], b[None], data_range=1.0)) for a, b in pairs]


def flicker(frames: Frames) -> float | None:
    """Returns the mean absolute difference of successive frames, in units of [0, 1]; None for a single frame.

    Motion counts too, so it says something only beside the number of the same video sampled serially.
    """
    if len(frames) < 2:
        return None
    return float(abs(frames[1:].astype("float64") - frames[:-1]).mean())
