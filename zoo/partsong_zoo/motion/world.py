"""Defines the world of the `motion` models: what captions state of moving objects, and where these are at any moment.

One or two objects move over a plain ground of 32 x 32 pixels, x to the right and y downwards. Motion never ends and has
no preferred moment: an object that *moves* leaves through one side and comes in again through the other, and one that
*bounces* runs between two walls. A window cut from the middle of such a video looks like one from its start, and frame
2000 has a right answer as frame 0 does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partsong.errors import ArgumentError
from partsong_zoo.shapes.scenes import COLOURS, GROUND, generator

__all__ = ["COLOURS", "GROUND", "generator"]

EXTENT = 32
SHAPES = ("circle", "square", "triangle")
#: Half the width in pixels, by the word of a caption; an object without such a word is of middle size.
SIZES: dict[str | None, float] = {"small": 3.5, None: 5.0, "big": 6.5}
#: Pixels per frame, by the word of a caption.
SPEEDS: dict[str | None, float] = {"slowly": 0.5, None: 1.0, "quickly": 1.75}
#: Unit vectors of motion, by their words; the first four run for ever, the last two between walls.
MOTIONS: dict[str, tuple[int, int]] = {
    "moves right": (1, 0),
    "moves left": (-1, 0),
    "moves up": (0, -1),
    "moves down": (0, 1),
    "bounces left and right": (1, 0),
    "bounces up and down": (0, 1),
}
#: The gap between a wall and an object that touches it; objects in neighbouring lanes keep twice that.
MARGIN = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class MovingItem:
    """Describes one object as a caption names it; `size` and `speed` are None if the caption does not state them."""

    colour: str
    shape: str
    motion: str
    size: str | None = None
    speed: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MovingScene:
    """Holds the facts of a caption: its objects in order of mention, of different colours."""

    items: tuple[MovingItem, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mover:
    """Describes an object with a path: `x`, `y` centre at frame 0, `radius` in pixels, `speed` in pixels per frame.

    `heading` is -1 for one that bounces and runs left or up at frame 0, else 1.
    """

    colour: str
    shape: str
    motion: str
    radius: float
    speed: float
    x: float
    y: float
    heading: int = 1

    def centres(self, frames: NDArray[np.integer | np.floating]) -> NDArray[np.float64]:
        """Computes the centres `[frames, 2]` (x, y) at frame numbers `[frames]`, in [0, 32)."""
        step = self.speed * np.asarray(frames, np.float64)
        centre = np.stack([np.full_like(step, self.x), np.full_like(step, self.y)], axis=1)
        direction = MOTIONS[self.motion]
        if self.motion.startswith("moves"):
            return (centre + step[:, None] * np.asarray(direction, np.float64)) % EXTENT
        axis = direction.index(1)
        low, span = self.radius + MARGIN, EXTENT - 2 * (self.radius + MARGIN)
        start = centre[0, axis] - low
        phase = ((start if self.heading > 0 else 2 * span - start) + step) % (2 * span)
        centre[:, axis] = low + np.minimum(phase, 2 * span - phase)
        return centre


def axis_of(motion: str) -> int:
    """Returns 0 for a motion to the left or right, 1 for one up or down."""
    return 0 if MOTIONS[motion][0] else 1


def apart(movers: list[Mover]) -> bool:
    """Returns whether two objects on one axis have separate lanes. Those on crossing axes meet, the later in front."""
    if len(movers) < 2 or axis_of(movers[0].motion) != axis_of(movers[1].motion):
        return True
    first, second = movers
    lanes = (first.y, second.y) if axis_of(first.motion) == 0 else (first.x, second.x)
    return abs(lanes[0] - lanes[1]) >= first.radius + second.radius + 2 * MARGIN


def layout(scene: MovingScene, rng: np.random.Generator) -> list[Mover]:
    """Draws where the objects of `scene` are at frame 0, every moment of their motion being equally likely.

    Args:
        scene: The facts.
        rng: Draws the places.

    Returns:
        One `Mover` per item, in the order of the items; later ones are drawn in front.
    """
    for _ in range(10_000):
        movers = []
        for item in scene.items:
            radius = SIZES[item.size]
            place = rng.uniform(radius + MARGIN, EXTENT - radius - MARGIN, 2)
            if item.motion.startswith("moves"):
                place[axis_of(item.motion)] = rng.uniform(0, EXTENT)
            movers.append(
                Mover(
                    colour=item.colour,
                    shape=item.shape,
                    motion=item.motion,
                    radius=radius,
                    speed=SPEEDS[item.speed],
                    x=float(place[0]),
                    y=float(place[1]),
                    heading=1 if item.motion.startswith("moves") or rng.random() < 0.5 else -1,
                )
            )
        if apart(movers):
            return movers
    raise ArgumentError(f"no lanes for the objects of {scene}; name one or two objects")


def draw_scene(rng: np.random.Generator, pairs: float = 0.25) -> MovingScene:
    """Draws what one object does, or in a share `pairs` of the scenes two, for captions."""
    num = 1 + int(rng.random() < pairs)
    colours = rng.choice(list(COLOURS), size=num, replace=False)
    items = []
    for colour in colours:
        items.append(
            MovingItem(
                colour=str(colour),
                shape=SHAPES[int(rng.integers(len(SHAPES)))],
                motion=list(MOTIONS)[int(rng.integers(len(MOTIONS)))],
                size=list(SIZES)[int(rng.integers(len(SIZES)))],
                speed=list(SPEEDS)[int(rng.integers(len(SPEEDS)))],
            )
        )
    return MovingScene(items=tuple(items))
