"""Writes captions of moving objects in sentences of a small grammar, and parses them back into facts."""

from __future__ import annotations

import re

import numpy as np

from partsong.errors import ArgumentError
from partsong_zoo.motion.world import (
    COLOURS,
    MOTIONS,
    SHAPES,
    SIZES,
    SPEEDS,
    MovingItem,
    MovingScene,
    draw_scene,
)
from partsong_zoo.shapes.grammar import fresh_captions, held_out

_SIZES = tuple(word for word in SIZES if word)
_SPEEDS = tuple(word for word in SPEEDS if word)
GRAMMAR = (
    "sentence = OBJECT | OBJECT, OBJECT; OBJECT = a [small|big] COLOUR SHAPE MOTION [slowly|quickly]; "
    f"COLOUR = {'|'.join(COLOURS)} (two objects differ in colour); SHAPE = {'|'.join(SHAPES)}; "
    f"MOTION = {'|'.join(MOTIONS)}|moves DIRECTION and bounces"
)
_WAYS = ("right", "left", "up", "down")
#: Every word of the grammar, in the order of the tokenizer's ids.
WORDS = ("a", ",", "and", "moves", "bounces", *_WAYS, *_SIZES, *COLOURS, *SHAPES, *_SPEEDS)
_OBJECT = re.compile(
    rf"(?:an?|the|one) (?:(?P<size>{'|'.join(_SIZES)}) )?(?P<colour>{'|'.join(COLOURS)}) (?P<shape>{'|'.join(SHAPES)}) "
    rf"(?P<motion>moves (?:{'|'.join(_WAYS)})(?: and bounces)?|bounces left and right|bounces up and down)"
    rf"(?: (?P<speed>{'|'.join(_SPEEDS)}))?"
)
_JOINT = re.compile(r"(?: , and| ,| and) ")
_MAX_OBJECTS = 2


def _normal(caption: str) -> str:
    text = re.sub(r"\s+", " ", caption.strip().lower().rstrip(".!"))
    text = re.sub(r" ?, ?", " , ", text)
    return re.sub(r"\blarge\b", "big", text).strip()


def _item(match: re.Match[str]) -> MovingItem:
    """Reads the facts of one object; `moves up and bounces` is another way to say `bounces up and down`."""
    words = match.groupdict()
    if words["motion"].endswith("and bounces"):
        sideways = words["motion"].split()[1] in ("left", "right")
        words["motion"] = "bounces left and right" if sideways else "bounces up and down"
    return MovingItem(**words)


def parse(caption: str) -> MovingScene:
    """Reads the facts of a caption.

    Args:
        caption: A sentence of the grammar (case, commas' spaces and a final full stop do not matter).

    Returns:
        The facts, objects in order of mention.

    Raises:
        ArgumentError: (a ValueError) If the sentence is not of the grammar; the message has the grammar.

    >>> parse("a big red circle moves right slowly").items[0].motion
    'moves right'
    """
    text, items, position, ended = _normal(caption), [], 0, False
    while len(items) < _MAX_OBJECTS and (match := _OBJECT.match(text, position)) is not None:
        items.append(_item(match))
        position, ended = match.end(), True
        joint = _JOINT.match(text, position)
        if joint is None:
            break
        position, ended = joint.end(), False
    if not ended or position != len(text):
        raise ArgumentError(f"cannot read {caption!r} from {text[position:]!r} on; the grammar is: {GRAMMAR}")
    if len({item.colour for item in items}) < len(items):
        raise ArgumentError(f"{caption!r} names two {items[0].colour} objects; give them different colours")
    return MovingScene(items=tuple(items))


def write(scene: MovingScene) -> str:
    """Writes the sentence that states `scene`, the inverse of `parse`."""
    phrases = (("a", item.size, item.colour, item.shape, item.motion, item.speed) for item in scene.items)
    return ", ".join(" ".join(word for word in phrase if word) for phrase in phrases)


def describe(scene: MovingScene, rng: np.random.Generator) -> str:
    """Writes a caption of `scene` for training: objects in their order, a fifth of the bounces in the other wording."""
    caption = write(scene)
    for item in scene.items:
        if item.motion.startswith("bounces") and rng.random() < 0.2:
            ways = _WAYS[:2] if item.motion.endswith("right") else _WAYS[2:]
            other = f"moves {ways[int(rng.integers(2))]} and bounces"
            name = f"{item.colour} {item.shape}"
            caption = caption.replace(f"{name} {item.motion}", f"{name} {other}")
    return caption


def captions(num: int, seed: int) -> list[str]:
    """Draws captions, none of which training has shown; see `partsong_zoo.shapes.captions`."""
    return fresh_captions(num, 41, seed, lambda rng: write(draw_scene(rng)))


def training_scene(rng: np.random.Generator, pairs: float = 0.25) -> MovingScene:
    """Draws a scene whose caption training may show; a share `pairs` of them has two objects."""
    while held_out(write(scene := draw_scene(rng, pairs))):
        pass
    return scene
