"""Reads videos deterministically: follows every coloured object through the frames. Nothing is learned.

Each pixel is un-mixed into ground and one palette colour, as in the reader of `shapes`. Each colour's pixels are then
compared, by correlation, with every shape of every size drawn at every half pixel of the endless ground. Pixels of
another colour are ignored, so an object half behind another one is still recognised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partsong.errors import ArgumentError
from partsong_zoo.motion.drawing import FloatArray, coverage
from partsong_zoo.motion.world import COLOURS, EXTENT, SHAPES
from partsong_zoo.shapes.reader import unmix

#: Half widths the reader tries; the drawn ones are 3.5, 5 and 6.5.
RADII = np.arange(2.5, 8.01, 0.5)
#: With fewer pixels of a colour there is no object; the smallest drawn one has 22.
SPECK = 9.0
#: Least twice the overlap over the sum of areas, for an object, and for an object whose shape gets a name.
PRESENT, NAMED = 0.5, 0.78
#: An object is judged where at least this share of it is in front; if it never is, wherever it is seen.
VISIBLE = 0.5
#: If never more than this share of it is in front, it is the mixed edge of two objects, not a third one.
GHOST = 0.3
_HALVES = np.asarray([(x, y) for y in (0.0, 0.5) for x in (0.0, 0.5)])
_CHUNK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Track:
    """Follows one colour's object through a video; arrays have one entry per frame, positions and sizes are in pixels.

    Attributes:
        colour: A name of the palette.
        seen: Whether the object is there.
        shape: Its shape's index in `SHAPES`; -1 if it resembles no shape.
        radius: Half its width.
        centre: `[frames, 2]`, x and y in [0, 32).
        visible: The share of it that is in front of the others.
        hidden: Whether it is unseen because its path leads behind another object.
        extra: Whether the frame shows more of the colour, away from the object.
        rgb: `[frames, 3]`, the mean colour of its inside, 0 to 255.
    """

    colour: str
    seen: NDArray[np.bool_]
    shape: NDArray[np.int64]
    radius: NDArray[np.float64]
    centre: NDArray[np.float64]
    visible: NDArray[np.float64]
    hidden: NDArray[np.bool_]
    extra: NDArray[np.bool_]
    rgb: NDArray[np.float64]

    @property
    def judged(self) -> NDArray[np.bool_]:
        """Says in which frames enough of the object is in front to tell its shape and size."""
        enough = self.seen & (self.visible >= VISIBLE)
        return enough if enough.any() else self.seen

    def steps(self) -> NDArray[np.float64]:
        """Returns the movement `[frames - 1, 2]` from each frame to the next, the shorter way; NaN next to a gap."""
        step = (np.diff(self.centre, axis=0) + EXTENT / 2) % EXTENT - EXTENT / 2
        return np.where((self.seen[1:] & self.seen[:-1])[:, None], step, np.nan)


def as_frames(frames: Any) -> FloatArray:
    """Turns a video into `[frames, 32, 32, 3]` float32 in 0-255.

    Args:
        frames: An array `[frames, 32, 32, 3]`, uint8 or float in [0, 1], or a list of such pictures or PIL images.

    Raises:
        ArgumentError: (a ValueError) If the array has another shape or kind.
    """
    if isinstance(frames, list | tuple):
        frames = np.stack([np.asarray(f.convert("RGB") if hasattr(f, "convert") else f) for f in frames])
    array = np.asarray(frames)
    if array.ndim != 4 or array.shape[1:] != (EXTENT, EXTENT, 3) or not len(array):
        raise ArgumentError(f"expected a video [frames, 32, 32, 3], got an array of shape {array.shape}")
    if array.dtype == np.uint8:
        return array.astype(np.float32)
    if np.issubdtype(array.dtype, np.floating):
        return np.clip(array.astype(np.float32), 0.0, 1.0) * 255.0
    raise ArgumentError(f"expected uint8 or floats in [0, 1], got {array.dtype}")


@cache
def _bank() -> tuple[FloatArray, NDArray[np.complex64], NDArray[np.complex64]]:
    """Draws all shapes and sizes at the four half pixels, `[shapes * radii, 4, 32, 32]`, with two conjugate spectra."""
    drawn = np.stack([coverage(shape, radius, _HALVES) for shape in SHAPES for radius in RADII])
    # Centred at pixel corner (0, 0), so that a shift by whole pixels is the centre itself.
    spectrum, squares = (np.conj(np.fft.rfft2(x)).astype(np.complex64) for x in (drawn, drawn**2))
    return drawn, spectrum, squares


def _overlap(cover: FloatArray, free: FloatArray) -> FloatArray:
    """Measures the fit of each shape, size and place: `[frames, shapes * radii, 64, 64]`, at half pixels, 1 at best."""
    _, spectrum, squares = _bank()
    shape = (EXTENT, EXTENT)
    both = np.fft.irfft2(np.fft.rfft2(cover)[:, None, None] * spectrum, shape)
    own = np.fft.irfft2(np.fft.rfft2(free)[:, None, None] * squares, shape)
    total = np.maximum((cover**2).sum(axis=(1, 2))[:, None, None, None, None] + own, 1e-6)
    score = (2 * both / total).reshape(len(cover), -1, 2, 2, EXTENT, EXTENT)
    return score.transpose(0, 1, 4, 2, 5, 3).reshape(len(cover), -1, 2 * EXTENT, 2 * EXTENT).astype(np.float32)


def _peak(score: FloatArray) -> NDArray[np.float64]:
    """Finds the place (x, y) of the largest of `[64, 64]` scores in pixels, between the half pixels by a parabola."""
    row, column = np.unravel_index(int(np.argmax(score)), score.shape)
    place = []
    for line, index in ((score[row], column), (score[:, column], row)):
        before, here, after = (float(line[(index + d) % len(line)]) for d in (-1, 0, 1))
        bend = before - 2 * here + after
        place.append((index + (0.5 * (before - after) / bend if bend < 0 else 0.0)) / 2)
    return np.asarray(place) % EXTENT


def _follow(colour: int, pixels: FloatArray, owner: NDArray[np.int64], cover: FloatArray) -> dict[str, Any]:
    """Makes the columns of one colour's track for some frames."""
    own = np.where(owner == colour, cover, 0.0).astype(np.float32)
    free = np.where((owner != colour) & (cover > 0.25), 0.0, 1.0).astype(np.float32)
    num = len(own)
    columns: dict[str, Any] = {
        "seen": np.zeros(num, np.bool_),
        "shape": np.full(num, -1),
        "radius": np.full(num, np.nan),
        "centre": np.full((num, 2), np.nan),
        "visible": np.zeros(num),
        "extra": np.zeros(num, np.bool_),
        "rgb": np.full((num, 3), np.nan),
    }
    for frame in np.flatnonzero(own.sum(axis=(1, 2)) >= SPECK):
        _place(columns, int(frame), own[frame], free[frame], pixels[frame])
    return columns


def _place(columns: dict[str, Any], frame: int, own: FloatArray, free: FloatArray, pixels: FloatArray) -> None:
    """Finds the object in one frame and fills in its row."""
    score = _overlap(own[None], free[None])[0]
    best = int(np.argmax(score.max(axis=(1, 2))))
    quality = float(score[best].max())
    if quality < PRESENT:
        return
    centre = _peak(score[best])
    shape, radius = divmod(best, len(RADII))
    drawn = coverage(SHAPES[shape], float(RADII[radius]), centre[None])[0]
    grown = coverage(SHAPES[shape], float(RADII[radius]) + 1.5, centre[None])[0]
    inside = (drawn > 0.99) & (free > 0)
    columns["seen"][frame] = True
    columns["shape"][frame] = shape if quality >= NAMED else -1
    columns["radius"][frame] = _size(score, shape, radius)
    columns["centre"][frame] = centre
    columns["visible"][frame] = float((drawn * free).sum() / drawn.sum())
    columns["extra"][frame] = float((own * (grown == 0)).sum()) >= SPECK
    columns["rgb"][frame] = pixels[inside].mean(axis=0) if inside.any() else np.nan


def _size(score: FloatArray, shape: int, radius: int) -> float:
    """Finds the radius between the tried ones, by a parabola through the best scores of one shape."""
    line = score[shape * len(RADII) : (shape + 1) * len(RADII)].max(axis=(1, 2))
    if not 0 < radius < len(RADII) - 1:
        return float(RADII[radius])
    bend = float(line[radius - 1] - 2 * line[radius] + line[radius + 1])
    shift = 0.5 * float(line[radius - 1] - line[radius + 1]) / bend if bend < 0 else 0.0
    return float(RADII[radius] + shift * (RADII[1] - RADII[0]))


def read(frames: Any) -> list[Track]:
    """Follows the objects of a video.

    Args:
        frames: An array `[frames, 32, 32, 3]`, uint8 or float in [0, 1], or a list of pictures.

    Returns:
        One track per colour that has an object in at least one frame, in the palette's order. A sliver
        that is behind another object in all frames is not counted.

    Raises:
        ArgumentError: (a ValueError) If it is not such a video.
    """
    array = as_frames(frames)
    parts: list[list[dict[str, Any]]] = [[] for _ in COLOURS]
    for first in range(0, len(array), _CHUNK):
        pixels = array[first : first + _CHUNK]
        owner, cover = unmix(pixels)
        for colour in range(len(COLOURS)):
            parts[colour].append(_follow(colour, pixels, owner, cover))
    tracks = []
    for name, columns in zip(COLOURS, parts, strict=True):
        merged = {key: np.concatenate([part[key] for part in columns]) for key in columns[0]}
        if merged["visible"].max() >= GHOST:
            tracks.append(Track(colour=name, hidden=np.zeros(len(array), np.bool_), **merged))
    return [replace(track, hidden=_hidden(track, [t for t in tracks if t is not track])) for track in tracks]


def _hidden(track: Track, others: list[Track]) -> NDArray[np.bool_]:
    """Says in which frames an unseen object, if it goes on as before, is mostly covered by another one."""
    hidden, there = np.zeros(len(track.seen), np.bool_), np.flatnonzero(track.seen)
    look = _look(track, int(np.argmax(track.visible)))
    for frame in np.flatnonzero(~track.seen):
        centre = _expected(track, there, int(frame))
        if centre is None:
            continue
        own = look(centre)
        cover, last = np.zeros_like(own), int(there[np.argmin(np.abs(there - frame))])
        for other in others:
            # An object that was not there beside it has replaced it rather than covered it.
            if other.seen[frame] and other.seen[last]:
                cover = np.maximum(cover, _look(other, int(frame))(other.centre[frame]))
        hidden[frame] = float((own * cover).sum()) >= VISIBLE * float(own.sum())
    return hidden


def _look(track: Track, frame: int) -> Callable[[NDArray[np.float64]], FloatArray]:
    """Draws a track's object as it looks in one frame (a circle if it has no shape) at a centre."""
    shape = SHAPES[max(int(track.shape[frame]), 0)]
    return lambda centre: coverage(shape, float(track.radius[frame]), centre[None])[0]


def _expected(track: Track, there: NDArray[np.int64], frame: int) -> NDArray[np.float64] | None:
    """Estimates the centre at a frame without the object, from the frames with it on both sides or at least on one."""
    before, after = there[there < frame], there[there > frame]
    if len(before) and len(after):
        first, last = int(before[-1]), int(after[0])
        way = (track.centre[last] - track.centre[first] + EXTENT / 2) % EXTENT - EXTENT / 2
        pace = way / (last - first)
    else:
        ends = before[-5:] if len(before) else after[:5]
        steps = track.steps()[ends[:-1]]
        if not np.isfinite(steps).all() or not len(steps):
            return None
        first, pace = int(before[-1]) if len(before) else int(after[0]), np.median(steps, axis=0)
    if abs(frame - first) > EXTENT:
        return None
    return (track.centre[first] + (frame - first) * pace) % EXTENT
