"""Draws moving objects: anti-aliased shapes on a plain ground that has no edge, in numpy alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partsong.knobs import Count, check_knobs, type_hints
from partsong_zoo.motion.grammar import parse
from partsong_zoo.motion.world import COLOURS, EXTENT, GROUND, Mover, generator, layout
from partsong_zoo.shapes.drawing import distance

FloatArray = NDArray[np.float32]


def offsets(centres: NDArray[np.floating]) -> FloatArray:
    """Computes how far each pixel of a row lies after `centres` `[...]`: `[..., 32]` in [-16, 16), the shorter way."""
    gaps = np.arange(EXTENT) + 0.5 - np.asarray(centres)[..., None]
    return ((gaps + EXTENT / 2) % EXTENT - EXTENT / 2).astype(np.float32)


def coverage(shape: str, radius: float, centres: NDArray[np.floating]) -> FloatArray:
    """Computes the fraction of every pixel that an object with `centres` `[frames, 2]` covers, `[frames, 32, 32]`."""
    dx, dy = offsets(centres[:, 0])[:, None, :], offsets(centres[:, 1])[:, :, None]
    return np.clip(0.5 - distance(shape, dx, dy, radius), 0.0, 1.0).astype(np.float32)


def paint(movers: list[Mover], num_frames: int, start: int = 0) -> NDArray[np.uint8]:
    """Draws placed objects, later ones in front.

    Args:
        movers: The objects.
        num_frames: How many frames.
        start: The number of the first frame.

    Returns:
        An array `[num_frames, 32, 32, 3]`, uint8.
    """
    frames = np.arange(start, start + num_frames)
    video = np.broadcast_to(np.asarray(GROUND, np.float32), (num_frames, EXTENT, EXTENT, 3)).copy()
    for mover in movers:
        alpha = coverage(mover.shape, mover.radius, mover.centres(frames))[..., None]
        video = video * (1.0 - alpha) + np.asarray(COLOURS[mover.colour], np.float32) * alpha
    return np.rint(video).astype(np.uint8)


def render(caption: str, num_frames: Count, seed: int = 0) -> NDArray[np.uint8]:
    """Draws a video in which every fact of a caption holds.

    Args:
        caption: A sentence of the grammar.
        num_frames: How many frames, at least 1; motion has no end, so any number has a right answer.
        seed: Chooses where the objects are at frame 0.

    Returns:
        An array `[num_frames, 32, 32, 3]`, uint8. More frames continue fewer ones.

    Raises:
        ArgumentError: (a ValueError) If the sentence is not of the grammar, or there is no frame to draw.

    >>> render("a red circle moves right", 17).shape
    (17, 32, 32, 3)
    """
    check_knobs(type_hints(render), {"num_frames": num_frames})
    return paint(layout(parse(caption), generator(43, seed)), num_frames)
