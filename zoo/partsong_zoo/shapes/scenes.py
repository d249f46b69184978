"""Defines the world of the `shapes` model: what a scene is, and how random scenes are drawn.

A scene holds one to three objects on a plain light ground. `Scene` holds what a caption *says* (facts); `Thing` is an
object with pixels (colour, shape, centre and radius). Coordinates are in units of a 64 x 64 picture whatever size is
drawn, x to the right and y downwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partsong.errors import ArgumentError

#: Ground colour and the palette: far apart, and no two on one line through the ground colour.
GROUND = (238, 236, 230)
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 40, 40),
    "green": (40, 150, 70),
    "blue": (45, 85, 220),
    "yellow": (240, 195, 20),
    "purple": (150, 55, 175),
    "black": (35, 35, 40),
}
SHAPES = ("circle", "square", "triangle", "cross")
#: Radius ranges (half the width) of the two sizes; the reader's boundary lies between them.
SIZES: dict[str, tuple[float, float]] = {"small": (5.5, 6.5), "large": (9.5, 10.5)}
SIZE_BOUNDARY = 8.0
RELATIONS = ("left of", "right of", "above", "below")
ROWS = ("top", "", "bottom")
COLUMNS = ("left", "", "right")
PLACES = tuple(f"{row} {column}".strip() or "center" for row in ROWS for column in COLUMNS)
#: A place word is used in a caption only deep inside its third, and read with the boundaries between the bands.
BANDS = ((0.0, 21.0), (28.0, 36.0), (43.0, 64.0))
BAND_BOUNDARIES = (25.0, 39.0)
EXTENT = 64.0
GAP = 3.0
#: The smallest offset between centres that a caption may call a relation; the reader asks for much less.
RELATION_OFFSET = 12.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Describes one object as a caption names it; `size` and `place` are None if the caption does not state them."""

    colour: str
    shape: str
    size: str | None = None
    place: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Relation:
    """States that item `first` is in relation `name` to item `second` (indices into `Scene.items`)."""

    first: int
    name: str
    second: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Holds the facts of a caption: its objects in order of mention and their relations."""

    items: tuple[Item, ...]
    relations: tuple[Relation, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """Describes an object with pixels: `x`, `y` centre and `radius` in units of a 64 x 64 picture.

    `match` is how well the shape fits (intersection over union, 1.0 for a drawn object).
    """

    colour: str
    shape: str
    x: float
    y: float
    radius: float
    match: float = 1.0

    @property
    def size(self) -> str:
        """Returns `small` or `large`."""
        return "small" if self.radius < SIZE_BOUNDARY else "large"

    @property
    def place(self) -> str:
        """Names the third of the picture in which the centre lies, such as `top left` or `center`."""
        row = int(np.searchsorted(BAND_BOUNDARIES, self.y))
        column = int(np.searchsorted(BAND_BOUNDARIES, self.x))
        return PLACES[3 * row + column]


def generator(*key: int) -> np.random.Generator:
    """Makes a random generator that is a function of the integers `key` alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def relation_offset(name: str, first: Thing, second: Thing) -> float:
    """Measures how many pixels the centres are apart in the direction of relation `name` (negative: opposite)."""
    match name:
        case "left of":
            return second.x - first.x
        case "right of":
            return first.x - second.x
        case "above":
            return second.y - first.y
        case "below":
            return first.y - second.y
    raise ArgumentError(f"unknown relation {name!r}; known: {', '.join(RELATIONS)}")


def _coordinate(rng: np.random.Generator, radius: float, band: int | None) -> float:
    low, high = radius + 2.0, EXTENT - 2.0 - radius
    if band is not None:
        low, high = max(low, BANDS[band][0]), min(high, BANDS[band][1])
    return float(rng.uniform(low, high))


def clear(things: list[Thing]) -> bool:
    """Returns whether all bounding squares keep the gap between them."""
    return all(
        max(abs(a.x - b.x), abs(a.y - b.y)) >= a.radius + b.radius + GAP
        for i, a in enumerate(things)
        for b in things[:i]
    )


def draw_things(rng: np.random.Generator) -> list[Thing]:
    """Draws one to three objects with different colours that keep clear of each other."""
    num = int(rng.choice(3, p=(0.25, 0.4, 0.35))) + 1
    colours = [str(c) for c in rng.choice(list(COLOURS), size=num, replace=False)]
    shapes = [SHAPES[int(i)] for i in rng.integers(len(SHAPES), size=num)]
    sizes = [list(SIZES)[int(i)] for i in rng.integers(len(SIZES), size=num)]
    banded = num < 3 and rng.random() < 0.5
    while True:
        things = []
        for colour, shape, size in zip(colours, shapes, sizes, strict=True):
            radius = float(rng.uniform(*SIZES[size]))
            bands = (int(rng.integers(3)), int(rng.integers(3))) if banded else (None, None)
            x, y = (_coordinate(rng, radius, band) for band in bands)
            things.append(Thing(colour=colour, shape=shape, x=x, y=y, radius=radius))
        if clear(things):
            return things


def layout(scene: Scene, seed: int = 0) -> list[Thing]:
    """Places the objects of `scene` so that every fact holds.

    Args:
        scene: The facts.
        seed: Chooses among the layouts that satisfy them.

    Returns:
        One `Thing` per item, in the order of the items.

    Raises:
        ValueError: If no layout was found in 20000 tries (facts that contradict each other, or too many objects).
    """
    rng = generator(3, seed)
    for _ in range(20_000):
        things = []
        for item in scene.items:
            size = item.size or str(rng.choice(list(SIZES)))
            radius = float(rng.uniform(*SIZES[size]))
            place = PLACES.index(item.place) if item.place else None
            x = _coordinate(rng, radius, None if place is None else place % 3)
            y = _coordinate(rng, radius, None if place is None else place // 3)
            things.append(Thing(colour=item.colour, shape=item.shape, x=x, y=y, radius=radius))
        held = all(
            relation_offset(r.name, things[r.first], things[r.second]) >= RELATION_OFFSET for r in scene.relations
        )
        if held and clear(things):
            return things
    raise ArgumentError(
        f"no layout of {len(scene.items)} objects satisfies the facts {scene}; remove a relation or a place"
    )
