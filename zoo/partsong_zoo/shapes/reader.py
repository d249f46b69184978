"""Reads pictures deterministically: finds the objects and tells which facts of a caption hold.

It is the quality metric of the `shapes` model. Nothing is learned: each pixel is un-mixed into ground and one palette
colour, each connected region of a colour is compared with every shape drawn at its place, and the best fit names it.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partsong.errors import ArgumentError
from partsong_zoo.shapes.drawing import FloatArray, distance
from partsong_zoo.shapes.grammar import parse
from partsong_zoo.shapes.scenes import COLOURS, EXTENT, GROUND, SHAPES, Relation, Scene, Thing, relation_offset

#: A region smaller than this (in pixels of a 64 x 64 picture) is a speck; the smallest drawn object has over 60.
SPECK = 18.0
#: A region that overlaps no drawn shape this well gets no shape.
MATCH = 0.62
#: Centres must differ by this much in the stated direction; captions only state relations from 12 on.
RELATION_MARGIN = 4.0
#: A pixel belongs to a colour when it is covered this much, and lies this near (RGB, 0-255) to the mixture line.
COVERED, RESIDUAL = 0.5, 75.0


def as_array(image: Any) -> FloatArray:
    """Turns an RGB picture into `[height, width, 3]` float32 in 0-255.

    Args:
        image: A PIL image, or an array `[height, width, 3]`, uint8 or float in [0, 1].

    Raises:
        ValueError: If the array has another shape or kind.
    """
    if hasattr(image, "convert"):
        image = image.convert("RGB")
    array = np.asarray(image)
    if array.ndim != 3 or array.shape[-1] != 3:
        raise ArgumentError(f"expected an RGB picture [height, width, 3], got an array of shape {array.shape}")
    if array.dtype == np.uint8:
        return array.astype(np.float32)
    if np.issubdtype(array.dtype, np.floating):
        return np.clip(array.astype(np.float32), 0.0, 1.0) * 255.0
    raise ArgumentError(f"expected uint8 or floats in [0, 1], got {array.dtype}")


def unmix(array: FloatArray) -> tuple[NDArray[np.int64], FloatArray]:
    """Finds for every pixel the palette colour whose mixture with the ground is nearest, and its coverage."""
    ground = np.asarray(GROUND, np.float32)
    axes = np.asarray(list(COLOURS.values()), np.float32) - ground
    offset = array - ground
    alpha = np.clip(offset @ axes.T / (axes**2).sum(axis=1), 0.0, 1.15)
    residual = np.linalg.norm(offset[..., None, :] - alpha[..., None] * axes, axis=-1)
    # Prefer the colour that explains the pixel by much of itself: faint pixels fit every colour.
    best = np.argmin(residual, axis=-1)
    cover = np.take_along_axis(alpha, best[..., None], -1)[..., 0]
    near = np.take_along_axis(residual, best[..., None], -1)[..., 0] < RESIDUAL
    return best, np.where(near, np.minimum(cover, 1.0), 0.0).astype(np.float32)


def regions(mask: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """Finds the connected regions (four neighbours) of a mask."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        padded = np.pad(labels, 1)
        spread = np.maximum.reduce([labels, padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]])
        spread = np.where(mask, spread, 0)
        if np.array_equal(spread, labels):
            return [labels == value for value in np.unique(labels) if value]
        labels = spread


def _fit(cover: FloatArray, region: NDArray[np.bool_], colour: str, scale: tuple[float, float]) -> Thing | None:
    """Finds the drawn shape that overlaps a region best, around the region's bounding box."""
    rows, columns = np.nonzero(region)
    top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
    window = np.s_[max(top - 2, 0) : bottom + 2, max(left - 2, 0) : right + 2]
    seen = np.where(region, 1.0, cover)[window].astype(np.float32)
    seen = np.where(_grow(region)[window], seen, 0.0)
    ys = ((np.arange(seen.shape[0]) + window[0].start + 0.5) * scale[0]).astype(np.float32)
    xs = ((np.arange(seen.shape[1]) + window[1].start + 0.5) * scale[1]).astype(np.float32)
    width, height = (right - left) * scale[1], (bottom - top) * scale[0]
    x, y = (left + right) / 2 * scale[1], (top + bottom) / 2 * scale[0]
    shifts = np.asarray([-0.7, 0.0, 0.7], np.float32)
    best: Thing | None = None
    for shape in SHAPES:
        tall, drop = {"square": (1.8, 0.0), "triangle": (1.85, 0.075)}.get(shape, (2.0, 0.0))
        wide = 1.8 if shape == "square" else 2.0
        radius = (width / wide + height / tall) / 2 + shifts[:, None, None, None, None]
        if float(radius.min()) <= 0:
            continue
        dx = xs[None, :] - x - shifts[:, None, None]
        dy = ys[:, None] - y - shifts[:, None, None]
        # Axes: radius, vertical shift, horizontal shift, rows, columns. A triangle's centre lies below its box's.
        gap_y = dy[None, :, None] - drop * radius
        gap_x = dx[None, None, :]
        drawn = np.clip(0.5 - distance(shape, gap_x, gap_y, radius) / np.sqrt(scale[0] * scale[1]), 0.0, 1.0)
        union = np.maximum(drawn, seen).sum(axis=(-2, -1))
        match = np.minimum(drawn, seen).sum(axis=(-2, -1)) / np.maximum(union, 1e-6)
        i, j, k = np.unravel_index(int(np.argmax(match)), match.shape)
        if best is None or match[i, j, k] > best.match:
            r = float(radius[i, 0, 0, 0, 0])
            centre_y = y + float(shifts[j]) + drop * r
            best = Thing(
                colour=colour,
                shape=shape,
                x=float(x + shifts[k]),
                y=float(centre_y),
                radius=r,
                match=float(match[i, j, k]),
            )
    return best


def _grow(region: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Grows a region by its eight neighbours."""
    padded = np.pad(region, 1)
    height, width = region.shape
    shifted = [padded[i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return np.logical_or.reduce(shifted)


def read(image: Any) -> list[Thing]:
    """Finds the objects of a picture.

    Args:
        image: A PIL image, or an array `[height, width, 3]`, uint8 or float in [0, 1], of any size.

    Returns:
        The objects from left to right. An object whose outline resembles no known shape has the shape `unclear`.
    """
    array = as_array(image)
    height, width = array.shape[:2]
    scale = (EXTENT / height, EXTENT / width)
    owner, cover = unmix(array)
    things: list[Thing] = []
    for index, colour in enumerate(COLOURS):
        own = np.where(owner == index, cover, 0.0).astype(np.float32)
        for region in regions(own > COVERED):
            if region.sum() * scale[0] * scale[1] < SPECK:
                continue
            thing = _fit(own, region, colour, scale)
            if thing is not None:
                things.append(thing if thing.match >= MATCH else _unclear(thing))
    return sorted(things, key=lambda thing: thing.x)


def _unclear(thing: Thing) -> Thing:
    return Thing(colour=thing.colour, shape="unclear", x=thing.x, y=thing.y, radius=thing.radius, match=thing.match)


def _item_facts(scene: Scene, chosen: tuple[Thing | None, ...]) -> dict[str, bool]:
    """Checks the facts of single objects; if the colour is missing, all of them are false."""
    held: dict[str, bool] = {}
    for number, (item, thing) in enumerate(zip(scene.items, chosen, strict=True), start=1):
        right = thing if thing is not None and thing.colour == item.colour else None
        name = f"{number} {item.colour} {item.shape}"
        held[f"colour: {name}"] = right is not None
        held[f"shape: {name}"] = right is not None and right.shape == item.shape
        if item.size:
            held[f"size: {name} {item.size}"] = right is not None and right.size == item.size
        if item.place:
            held[f"place: {name} {item.place}"] = right is not None and right.place == item.place
    return held


def _relation_fact(relation: Relation, scene: Scene, chosen: tuple[Thing | None, ...]) -> bool:
    first, second = chosen[relation.first], chosen[relation.second]
    if first is None or second is None:
        return False
    if first.colour != scene.items[relation.first].colour or second.colour != scene.items[relation.second].colour:
        return False
    return bool(relation_offset(relation.name, first, second) >= RELATION_MARGIN)


def facts(caption: str, image: Any) -> dict[str, bool]:
    """Tells which facts of a caption hold in a picture.

    The facts are `count` (as many objects as the caption names, no more), and per object its `colour`, `shape`,
    `size` and `place` as far as stated, and each stated `relation`. An object is known by its colour: where the
    colour is missing, all facts about the object are false.

    Args:
        caption: A sentence of the grammar.
        image: A PIL image, or an array `[height, width, 3]`, uint8 or float in [0, 1].

    Returns:
        Fact names (`kind: what`) and whether each holds.

    Raises:
        ValueError: If the caption is not of the grammar, or `image` is not an RGB picture.
    """
    scene = parse(caption)
    things = read(image)
    slots: list[Thing | None] = [*things[:8], *([None] * len(scene.items))]
    best: dict[str, bool] = {}
    for chosen in dict.fromkeys(itertools.permutations(slots, len(scene.items))):
        held = {"count: " + str(len(scene.items)): len(things) == len(scene.items)}
        held |= _item_facts(scene, chosen)
        for relation in scene.relations:
            words = f"{scene.items[relation.first].colour} {relation.name} {scene.items[relation.second].colour}"
            held[f"relation: {relation.first + 1} {words}"] = _relation_fact(relation, scene, chosen)
        if not best or sum(held.values()) > sum(best.values()):
            best = held
    return best


def facts_read(caption: str, image: Any) -> float | None:
    """Returns the fraction of a caption's facts that hold in a picture.

    Args:
        caption: Any text.
        image: A PIL image, or an array `[height, width, 3]`, uint8 or float in [0, 1].

    Returns:
        A number in [0, 1], or None when the caption is empty or not a sentence of the grammar.
    """
    try:
        parse(caption)
    except ValueError:
        return None
    held = facts(caption, image)
    return sum(held.values()) / len(held)
