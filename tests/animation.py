"""Draws small pictures, sheets and GIFs for the documentation with Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

PAPER, INK, GREY = (255, 255, 255), (34, 34, 34), (225, 225, 225)
GAP = 8
Pixels = NDArray[np.float32]


def enlarged(pixels: Pixels, side: int) -> Image.Image:
    """Returns a picture `[H, W, 3]` in [0, 1] with `side` pixels a side, every pixel a block or a part of one."""
    image = Image.fromarray((np.clip(pixels, 0, 1) * 255).round().astype(np.uint8))
    return image.resize((side, side), Image.Resampling.NEAREST)


def font(size: int = 13) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Returns the font that Pillow brings along."""
    return ImageFont.load_default(size)


def labelled(tiles: Sequence[Image.Image], labels: Sequence[str], foot: str = "") -> Image.Image:
    """Returns tiles of one size side by side, each under its label, over a line of text."""
    width, height = tiles[0].size
    top = 22 if any(labels) else 0
    sheet = Image.new("RGB", (len(tiles) * (width + GAP) - GAP, top + height + (24 if foot else 0)), PAPER)
    pen = ImageDraw.Draw(sheet)
    for place, (tile, label) in enumerate(zip(tiles, labels, strict=True)):
        sheet.paste(tile, (place * (width + GAP), top))
        pen.text((place * (width + GAP), 2), label, fill=INK, font=font())
    pen.text((0, top + height + 5), foot, fill=INK, font=font())
    return sheet


def save_gif(path: Path, frames: Sequence[Image.Image], milliseconds: int, last: int = 2000, colours: int = 64) -> None:
    """Writes an endless GIF whose frames share one palette, and whose last frame stays longer.

    Args:
        path: where to.
        frames: of one size.
        milliseconds: of each frame.
        last: milliseconds of the last one.
        colours: at most so many.
    """
    palette = _palette(frames, colours)
    flat = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [milliseconds] * (len(flat) - 1) + [last]
    flat[0].save(path, save_all=True, append_images=flat[1:], duration=times, loop=0, optimize=True)


def _palette(frames: Sequence[Image.Image], colours: int) -> Image.Image:
    """Returns a palette of what frames show, in which a colour of a few pixels has its place too."""
    pixels = np.concatenate(
        [np.asarray(frame.convert("RGB")).reshape(-1, 3) for frame in frames[:: len(frames) // 12 + 1]]
    )
    seen, counts = np.unique(pixels // 8 * 8 + 4, axis=0, return_counts=True)
    weighed = np.repeat(seen, 1 + np.log2(counts).astype(int), axis=0).astype(np.uint8)
    fixed = [*PAPER, *INK, *GREY]
    chosen = Image.fromarray(weighed[None]).quantize(colours - 3, method=Image.Quantize.MEDIANCUT, kmeans=2)
    palette = Image.new("P", (1, 1))
    palette.putpalette([*fixed, *(chosen.getpalette() or [])[: 3 * (colours - 3)]])
    return palette
