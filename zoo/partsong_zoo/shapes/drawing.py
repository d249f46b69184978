"""Draws scenes: anti-aliased shapes on a plain ground, in numpy alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partsong.errors import ArgumentError
from partsong_zoo.shapes.scenes import COLOURS, EXTENT, GROUND, SHAPES, Scene, Thing, layout

FloatArray = NDArray[np.float32]


def distance(shape: str, dx: FloatArray, dy: FloatArray, radius: float | FloatArray) -> NDArray[np.floating]:
    """Computes the signed distance (negative inside, pixels) to a shape whose centre is the origin.

    Args:
        shape: A name from `SHAPES`.
        dx: Offsets to the right of the centre, any shape that broadcasts.
        dy: Offsets below the centre.
        radius: Half the width of the shape.
    """
    match shape:
        case "circle":
            return np.hypot(dx, dy) - radius
        case "square":
            return np.maximum(np.abs(dx), np.abs(dy)) - 0.9 * radius
        case "triangle":
            # Apex up: base on the line y = 0.85 r, sides through (0, -r) and (+-r, 0.85 r).
            norm = np.hypot(1.85, 1.0)
            side = (1.85 * np.abs(dx) - (dy + radius)) / norm
            return np.maximum(side, dy - 0.85 * radius)
        case "cross":
            ax, ay = np.abs(dx), np.abs(dy)
            arm = radius / 3.0
            return np.minimum(np.maximum(ax - radius, ay - arm), np.maximum(ay - radius, ax - arm))
    raise ArgumentError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")


def coverage(thing: Thing, height: int, width: int) -> FloatArray:
    """Computes the fraction of every pixel that `thing` covers, `[height, width]`, in a picture of any size."""
    scale_y, scale_x = EXTENT / height, EXTENT / width
    y = ((np.arange(height, dtype=np.float32) + 0.5) * scale_y - thing.y)[:, None]
    x = ((np.arange(width, dtype=np.float32) + 0.5) * scale_x - thing.x)[None, :]
    pixel = (scale_x * scale_y) ** 0.5
    return np.clip(0.5 - distance(thing.shape, x, y, thing.radius) / pixel, 0.0, 1.0).astype(np.float32)


def paint(things: list[Thing], height: int = 64, width: int = 64) -> NDArray[np.uint8]:
    """Draws placed objects.

    Args:
        things: Objects in units of a 64 x 64 picture.
        height: Picture height in pixels.
        width: Picture width in pixels.

    Returns:
        An array `[height, width, 3]`, uint8.
    """
    image = np.broadcast_to(np.asarray(GROUND, np.float32), (height, width, 3)).copy()
    for thing in things:
        alpha = coverage(thing, height, width)[..., None]
        image = image * (1.0 - alpha) + np.asarray(COLOURS[thing.colour], np.float32) * alpha
    return np.rint(image).astype(np.uint8)


def render(scene: Scene, *, seed: int = 0, height: int = 64, width: int = 64) -> NDArray[np.uint8]:
    """Draws a picture in which every fact of `scene` holds.

    Args:
        scene: Facts, for example from `parse`.
        seed: Chooses positions (and sizes, where the facts leave them open).
        height: Picture height in pixels.
        width: Picture width in pixels.

    Returns:
        An array `[height, width, 3]`, uint8.

    Raises:
        ValueError: If the facts cannot hold together.
    """
    return paint(layout(scene, seed), height, width)
