"""Measures videos by the reader's tracks: a caption's facts, kept identity, jumps at block borders, and drift."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partsong.errors import ArgumentError
from partsong_zoo.motion.grammar import parse
from partsong_zoo.motion.reader import Track, read
from partsong_zoo.motion.world import COLOURS, EXTENT, GROUND, MOTIONS, SHAPES, SIZES, SPEEDS, MovingItem, axis_of

#: A fact holds if it does so in this share of the frames (or of the steps between them).
HOLDS = 0.8
#: Fewer frames show no motion.
MIN_FRAMES = 5
#: Shorter steps are rest. Steps along the axis must be this many times longer than those across.
REST, ALONG = 0.2, 2.0
#: Size and colour are compared if at least this share of an object is in front.
WHOLE = 0.9
#: An object that is judged in a smaller share of the frames has no trend.
LASTING = 0.25
#: Smaller jumps count as this much: half a reader's pixel, and an invisible change of colour and size.
PLACE_FLOOR, LOOK_FLOOR = 0.25, 0.05


def _nearest(words: dict[str | None, float], values: NDArray[np.floating]) -> NDArray[np.int64]:
    """Finds the index of the word whose value is nearest to each of `values`."""
    return np.argmin(np.abs(np.asarray(values)[..., None] - np.asarray(list(words.values()))), axis=-1)


def _share(held: NDArray[np.bool_], among: NDArray[np.bool_]) -> float:
    """Returns the fraction of the frames of `among` that hold; 0 if `among` is empty."""
    return float(held[among].mean()) if among.any() else 0.0


def _clear_steps(track: Track) -> NDArray[np.float64]:
    """Returns the track's movements between frames that show enough of it to place it; if these are few, all."""
    steps, clear = track.steps(), track.judged
    there, both = np.isfinite(steps[:, 0]), clear[1:] & clear[:-1]
    return steps[there & both] if (there & both).sum() >= MIN_FRAMES - 1 else steps[there]


def _moves(item: MovingItem, track: Track) -> bool:
    """Returns whether the track's motion is the item's."""
    steps, axis = _clear_steps(track), axis_of(item.motion)
    if len(steps) < MIN_FRAMES - 1:
        return False
    along, across = steps[:, axis], steps[:, 1 - axis]
    pace = float(np.median(np.abs(along)))
    if pace < REST or pace < ALONG * float(np.median(np.abs(across))):
        return False
    if item.motion.startswith("moves"):
        return float((along * sum(MOTIONS[item.motion]) > 0).mean()) >= HOLDS
    place, radius = track.centre[track.seen, axis], track.radius[track.seen]
    within = (place >= radius - 1.0) & (place <= EXTENT - radius + 1.0)
    return float(within.mean()) >= 0.9


def _speed(item: MovingItem, track: Track) -> bool:
    """Returns whether the track's pace is the item's."""
    steps = _clear_steps(track)[:, axis_of(item.motion)]
    if not len(steps):
        return False
    return list(SPEEDS)[int(_nearest(SPEEDS, np.median(np.abs(steps))))] == item.speed


def _item_facts(number: int, item: MovingItem, track: Track | None) -> dict[str, bool]:
    """Checks the facts of one object; if the colour is missing, all of them are false."""
    name = f"{number} {item.colour} {item.shape}"
    there = track is not None and float((track.seen | track.hidden).mean()) >= HOLDS
    held = {f"colour: {name}": there}
    if track is None or not there:
        held |= {f"shape: {name}": False, f"direction: {name} {item.motion}": False}
        held |= {f"size: {name} {item.size}": False} if item.size else {}
        return held | ({f"speed: {name} {item.speed}": False} if item.speed else {})
    held[f"shape: {name}"] = _share(track.shape == SHAPES.index(item.shape), track.judged) >= HOLDS
    if item.size:
        sized = _nearest(SIZES, track.radius) == list(SIZES).index(item.size)
        held[f"size: {name} {item.size}"] = _share(sized, track.judged) >= HOLDS
    moves = _moves(item, track)
    held[f"direction: {name} {item.motion}"] = moves
    if item.speed:
        held[f"speed: {name} {item.speed}"] = moves and _speed(item, track)
    return held


def facts(caption: str, frames: Any) -> dict[str, bool]:
    """Tells which facts of a caption hold in a video.

    The facts are `count` (as many objects as the caption names, no more), and per object its `colour`, `shape`,
    `direction` and, as far as stated, `size` and `speed`. An object is known by its colour: where the colour is
    missing, all facts about the object are false. A fact holds if it does so in four fifths of the frames in
    which the object can be judged (it may pass behind another one).

    Args:
        caption: A sentence of the grammar.
        frames: An array `[frames, 32, 32, 3]`, uint8 or float in [0, 1], of at least 5 frames, or a list of pictures.

    Returns:
        Fact names (`kind: what`) and whether each holds.

    Raises:
        ArgumentError: (a ValueError) If the caption is not of the grammar, or `frames` is not such a video.

    >>> from partsong_zoo.motion import render
    >>> caption = "a red circle moves right"
    >>> all(facts(caption, render(caption, 9)).values())
    True
    """
    scene, tracks = parse(caption), _tracks(frames)
    num = np.sum([t.seen | t.hidden for t in tracks], axis=0) + np.sum([t.extra for t in tracks], axis=0)
    held = {f"count: {len(scene.items)}": bool(np.mean(num == len(scene.items)) >= HOLDS)}
    for number, item in enumerate(scene.items, start=1):
        held |= _item_facts(number, item, next((t for t in tracks if t.colour == item.colour), None))
    return held


def _tracks(frames: Any) -> list[Track]:
    if len(frames) < MIN_FRAMES:
        raise ArgumentError(f"{len(frames)} frames show no motion; give at least {MIN_FRAMES}")
    return read(frames)


def facts_read(caption: str, frames: Any) -> float | None:
    """Returns the fraction of a caption's facts that hold in a video.

    Args:
        caption: Any text.
        frames: An array `[frames, 32, 32, 3]`, uint8 or float in [0, 1], of at least 5 frames, or a list of pictures.

    Returns:
        A number in [0, 1], or None when the caption is empty or not a sentence of the grammar.
    """
    try:
        parse(caption)
    except ValueError:
        return None
    held = facts(caption, frames)
    return sum(held.values()) / len(held)


def identity_kept(caption: str, frames: Any) -> float:
    """Returns the fraction of frames in which every named object is there with its colour, shape and size.

    An object without a word for its size must keep the size it has in the middle (median) of the video. An object
    that is mostly or wholly behind another one counts as there.

    Args:
        caption: A sentence of the grammar.
        frames: An array `[frames, 32, 32, 3]`, uint8 or float in [0, 1], of any length, or a list of pictures.

    Raises:
        ArgumentError: (a ValueError) If the caption is not of the grammar, or `frames` is not such a video.
    """
    scene, tracks = parse(caption), read(frames)
    same = np.ones(len(frames), np.bool_)
    for item in scene.items:
        track = next((t for t in tracks if t.colour == item.colour), None)
        same &= np.zeros(len(frames), np.bool_) if track is None else _same(item, track)
    return float(same.mean())


def _same(item: MovingItem, track: Track) -> NDArray[np.bool_]:
    """Returns for each frame whether the track looks like the item, as far as it can be seen."""
    judged = track.judged
    if not judged.any():
        return np.zeros(len(judged), np.bool_)
    radius = SIZES[item.size] if item.size else float(np.median(track.radius[judged]))
    sized = np.abs(track.radius - radius) <= 0.2 * radius
    shaped = track.shape == SHAPES.index(item.shape)
    return np.where(judged, sized & shaped, track.seen | track.hidden)


@dataclass(frozen=True, kw_only=True, slots=True)
class Jumps:
    """Compares jumps at block borders with the 99th percentile of the others; at 1 or less, borders are invisible.

    Attributes:
        place: The largest jump of an object's place at a border, over the percentile.
        look: The largest change of an object's colour and size at a border, over the percentile.
        typical: The median over borders of the larger of the two ratios.
    """

    place: float
    look: float
    typical: float

    @property
    def ratio(self) -> float:
        """Returns the larger of `place` and `look`."""
        return max(self.place, self.look)


def border_jumps(frames: Any, borders: Iterable[int]) -> Jumps:
    """Compares what happens at block borders with what happens between other frames.

    A jump of place is how far the paths before and after a step miss each other. So neither even motion, fast or slow,
    nor a bounce is a jump. A jump of look is a relative change of size plus a change of colour. An object that comes or
    goes (unless it does so behind another one) counts 1. Invisible jumps count as much as the smallest visible ones.

    Args:
        frames: An array `[frames, 32, 32, 3]`, uint8 or float in [0, 1], or a list of pictures.
        borders: The first frames of blocks, from 1 to `frames - 1`.

    Raises:
        ArgumentError: (a ValueError) If there is no border or one outside, or `frames` is not such a video.
    """
    tracks, num = read(frames), len(frames)
    at = sorted(set(borders))
    if not at or at[0] < 1 or at[-1] >= num or num - 1 <= len(at):
        raise ArgumentError(f"borders {at} of {num} frames; give first frames of blocks, 1 to {num - 1}, not all")
    place, look = np.full(num - 1, PLACE_FLOOR), np.full(num - 1, LOOK_FLOOR)
    for track in tracks:
        place, look = np.fmax(place, _place_jumps(track)), np.fmax(look, _look_jumps(track))
    mask = np.zeros(num - 1, np.bool_)
    mask[np.asarray(at) - 1] = True
    places, looks = (jump[mask] / np.percentile(jump[~mask], 99) for jump in (place, look))
    typical = float(np.median(np.maximum(places, looks)))
    return Jumps(place=float(places.max()), look=float(looks.max()), typical=typical)


def _place_jumps(track: Track) -> NDArray[np.float64]:
    """Measures by how many pixels the paths before and after each step, continued at their pace, miss each other.

    They are continued by any part of the step from one side and by the rest from the other, so that a bounce between
    two frames is no jump.
    """
    steps = track.steps()
    gap = np.full((1, 2), np.nan)
    before, after = np.concatenate([gap, steps[:-1]]), np.concatenate([steps[1:], gap])
    before, after = np.where(np.isnan(before), after, before), np.where(np.isnan(after), before, after)
    miss, turn = after - steps, before - after
    length = np.maximum((turn**2).sum(axis=1), 1e-12)
    part = np.clip(-(miss * turn).sum(axis=1) / length, 0.0, 1.0)
    return np.linalg.norm(miss + part[:, None] * turn, axis=1)


def _look_jumps(track: Track) -> NDArray[np.float64]:
    """Measures for each step the change of size (relative) and colour (of the distance to the ground)."""
    whole = track.seen & (track.visible >= WHOLE)
    both = whole[1:] & whole[:-1]
    size = np.abs(np.diff(track.radius)) / np.fmax(track.radius[1:], track.radius[:-1])
    far = np.linalg.norm(np.subtract(COLOURS[track.colour], GROUND))
    colour = np.linalg.norm(np.diff(track.rgb, axis=0), axis=1) / far
    gone = ~(track.seen | track.hidden)
    return np.where(gone[1:] != gone[:-1], 1.0, np.where(both, size + np.nan_to_num(colour), np.nan))


def trend(frames: Any) -> dict[str, float]:
    """Measures how far colour and size drift from the first to the last frame, by a straight line through all of them.

    Args:
        frames: An array `[frames, 32, 32, 3]`, uint8 or float in [0, 1], or a list of pictures.

    Returns:
        `colour` (of the distance between the palette's colour and the ground) and `size` (of the mean radius), each
        of the object that drifts most. An object that is judged in fewer than a quarter of the frames, such as a speck
        that comes and goes, is left out.

    Raises:
        ArgumentError: (a ValueError) If `frames` is not such a video, or shows nothing that can be followed.
    """
    worst = {"colour": [], "size": []}
    for track in read(frames):
        times = np.flatnonzero(track.judged & np.isfinite(track.rgb[:, 0]))
        if len(times) < max(MIN_FRAMES, LASTING * len(track.seen)):
            continue
        far = float(np.linalg.norm(np.subtract(COLOURS[track.colour], GROUND)))
        values = np.column_stack([track.rgb[times] / far, track.radius[times] / track.radius[times].mean()])
        slopes = np.polyfit(times, values, 1)[0] * (len(track.seen) - 1)
        worst["colour"].append(float(np.linalg.norm(slopes[:3])))
        worst["size"].append(float(abs(slopes[3])))
    if not worst["size"]:
        raise ArgumentError(f"no object can be followed through the {len(frames)} frames")
    return {name: max(values) for name, values in worst.items()}
