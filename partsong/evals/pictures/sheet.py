"""Draws the samples of a comparison side by side on one sheet, with what differs from the serial ones below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from partsong.evals.pictures.shelf import Frames
from partsong.outputs import rgb_bytes

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["AMPLIFIED", "Panel", "Row", "Tile", "difference", "draw_sheet"]

#: Difference maps are drawn this many times as bright as the difference.
AMPLIFIED = 10
#: In pixels: the longest side of a tile at least and at most, what lies between tiles, and around the sheet.
_SMALLEST, _LARGEST, _GUTTER, _MARGIN = 200, 320, 14, 24
_INK, _FAINT, _LINE = "#1d1c1a", "#6b6862", "#d8d4cc"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Shows one picture.

    Attributes:
        pixels: 8 bits, `[H, W, 3]`.
        label: text below it.
    """

    pixels: NDArray[np.uint8]
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Shows pictures beside each other.

    Attributes:
        tiles: of one size, None for an empty place.
        label: text above them.
    """

    tiles: Sequence[Tile | None]
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Shows the samples of one prompt.

    Attributes:
        title: text above it.
        rows: below each other.
    """

    title: str
    rows: Sequence[Row]


def difference(picture: Frames, twin: Frames) -> NDArray[np.uint8]:
    """Returns the absolute difference of two pictures `[H, W, 3]`, `AMPLIFIED` times, as 8 bits; black is equal."""
    return rgb_bytes(np.minimum(np.abs(picture.astype(np.float64) - twin) * AMPLIFIED, 1.0))


def draw_sheet(heading: str, panels: Sequence[Panel]) -> Image.Image:
    """Draws panels below each other, as one picture on white.

    Args:
        heading: text above all.
        panels: at least one, whose tiles all have one size.

    Example:
        >>> tile = Tile(pixels=np.zeros((64, 64, 3), np.uint8), label="serial, 1.00 s")
        >>> draw_sheet("shapes", [Panel(title="a red circle", rows=[Row(tiles=[tile])])]).mode
        'RGB'
    """
    from PIL import Image, ImageDraw

    tile = next(tile for panel in panels for row in panel.rows for tile in row.tiles if tile is not None)
    size = _tile_size(*tile.pixels.shape[:2])
    columns = max(len(row.tiles) for panel in panels for row in panel.rows)
    width = max(2 * _MARGIN + columns * (size[0] + _GUTTER) - _GUTTER, 480)
    pen = _Pen(width, size)
    # Once without paper, to know its height.
    pen.draw(heading, panels, None)
    sheet = Image.new("RGB", (width, pen.y + _MARGIN), "white")
    pen.draw(heading, panels, (sheet, ImageDraw.Draw(sheet)))
    return sheet


def _tile_size(height: int, width: int) -> tuple[int, int]:
    """Returns width and height of a tile: small pictures are enlarged by a whole number, large ones made smaller."""
    longest = max(height, width)
    scale = max(1, round(_SMALLEST / longest)) if longest <= _LARGEST else _LARGEST / longest
    return max(1, round(width * scale)), max(1, round(height * scale))


class _Pen:
    """Puts texts and tiles on paper from top to bottom, or only counts how far down they reach."""

    def __init__(self, width: int, size: tuple[int, int]) -> None:
        from PIL import ImageFont

        self.width, self.size, self.y = width, size, 0
        self._fonts = {points: ImageFont.load_default(points) for points in (13, 16, 18)}

    def draw(self, heading: str, panels: Sequence[Panel], paper: tuple[Any, Any] | None) -> None:
        self.y = _MARGIN
        self._text(paper, heading, _MARGIN, self.width - 2 * _MARGIN, 18, _INK)
        for panel in panels:
            self.y += _GUTTER
            if paper is not None:
                paper[1].line((_MARGIN, self.y, self.width - _MARGIN, self.y), _LINE)
            self.y += _GUTTER
            self._text(paper, panel.title, _MARGIN, self.width - 2 * _MARGIN, 16, _INK)
            for row in panel.rows:
                self._row(paper, row)

    def _row(self, paper: tuple[Any, Any] | None, row: Row) -> None:
        self.y += _GUTTER // 2
        self._text(paper, row.label, _MARGIN, self.width - 2 * _MARGIN, 13, _FAINT)
        top = bottom = self.y
        for column, tile in enumerate(row.tiles):
            if tile is None:
                continue
            x, self.y = _MARGIN + column * (self.size[0] + _GUTTER), top
            self._picture(paper, tile, x)
            self._text(paper, tile.label, x, self.size[0], 13, _FAINT)
            bottom = max(bottom, self.y)
        self.y = bottom

    def _picture(self, paper: tuple[Any, Any] | None, tile: Tile, x: int) -> None:
        from PIL import Image

        if paper is not None:
            image = Image.fromarray(tile.pixels)
            grows = image.width < self.size[0]
            how = Image.Resampling.NEAREST if grows else Image.Resampling.LANCZOS
            paper[0].paste(image.resize(self.size, how), (x, self.y))
        self.y += self.size[1] + 4

    def _text(self, paper: tuple[Any, Any] | None, text: str, x: int, width: int, points: int, ink: str) -> None:
        font = self._fonts[points]
        for line in _wrapped(text, lambda part: font.getlength(part) <= width):
            if paper is not None:
                paper[1].text((x, self.y), line, ink, font)
            self.y += round(points * 1.35)


def _wrapped(text: str, fits: Any) -> list[str]:
    """Breaks a text into lines, after a blank or a mark where there is one, and anywhere otherwise."""
    lines = []
    for rest in text.splitlines():
        while rest and not fits(rest):
            end = next((end for end in range(len(rest) - 1, 1, -1) if fits(rest[:end])), 1)
            marks = [place + 1 for place, mark in enumerate(rest[:end]) if mark in " ,:+-"]
            end = marks[-1] if marks and marks[-1] > end // 3 else end
            lines.append(rest[:end].rstrip())
            rest = rest[end:].lstrip()
        lines.append(rest)
    return lines
