"""Describes scenes in sentences of a small grammar, the captions, and parses them back into facts."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

import numpy as np

from partsong.errors import ArgumentError
from partsong_zoo.shapes.scenes import (
    BANDS,
    COLOURS,
    PLACES,
    RELATION_OFFSET,
    RELATIONS,
    SHAPES,
    SIZES,
    Item,
    Relation,
    Scene,
    Thing,
    draw_things,
    generator,
    relation_offset,
)

GRAMMAR = (
    "OBJECT = a [small|large] COLOUR SHAPE [at the PLACE]; "
    "sentence = OBJECT | OBJECT RELATION OBJECT [RELATION OBJECT] | OBJECT RELATION OBJECT and OBJECT | "
    "OBJECT and OBJECT | OBJECT, OBJECT and OBJECT; "
    f"COLOUR = {'|'.join(COLOURS)}; SHAPE = {'|'.join(SHAPES)}; RELATION = {'|'.join(RELATIONS)}; "
    f"PLACE = {'|'.join(PLACES)}"
)
_LITTLE_WORDS = ("a", "at", "the", "and", ",", "of", "above", "below", "left", "right", "top", "bottom", "center")
#: Every word of the grammar, in the order of the tokenizer's ids.
WORDS = (*_LITTLE_WORDS, *SIZES, *COLOURS, *SHAPES)
_PLACE = "|".join(sorted(PLACES, key=len, reverse=True))
_OBJECT = re.compile(
    rf"(?:an?|the|one) (?:(?P<size>{'|'.join(SIZES)}) )?(?P<colour>{'|'.join(COLOURS)}) (?P<shape>{'|'.join(SHAPES)})"
    rf"(?: (?:at|in|on) the (?P<place>{_PLACE})(?! of))?"
)
_JOINT = re.compile(rf" ?(?P<joint>, and|,|and|{'|'.join(RELATIONS)}) ")
_MAX_OBJECTS = 3


def held_out(caption: str) -> bool:
    """Returns whether a caption belongs to the eighth of all sentences that training never shows."""
    return zlib.crc32(caption.encode()) % 8 == 0


def _normal(caption: str) -> str:
    text = re.sub(r"\s+", " ", caption.strip().lower().rstrip(".!"))
    text = re.sub(r" ?, ?", " , ", text)
    text = re.sub(r"\b(to|on) the (left|right) of\b", r"\2 of", text)
    return text.replace("top-", "top ").replace("bottom-", "bottom ").replace("centre", "center").strip()


def parse(caption: str) -> Scene:
    """Reads the facts of a caption.

    Args:
        caption: A sentence of the grammar (case, commas' spaces and a final full stop do not matter).

    Returns:
        The facts, objects in order of mention.

    Raises:
        ValueError: If the sentence is not of the grammar; the message lists the grammar.
    """
    text = _normal(caption)
    items: list[Item] = []
    relations: list[Relation] = []
    position = 0
    while (match := _OBJECT.match(text, position)) is not None and len(items) < _MAX_OBJECTS:
        items.append(Item(**match.groupdict()))
        position = match.end()
        joint = _JOINT.match(text, position)
        if joint is None:
            break
        position = joint.end()
        if joint["joint"] in RELATIONS:
            relations.append(Relation(first=len(items) - 1, name=joint["joint"], second=len(items)))
    ended_on_joint = bool(relations) and relations[-1].second >= len(items)
    if not items or position != len(text) or ended_on_joint:
        raise ArgumentError(f"cannot read {caption!r} from {text[position:]!r} on; the grammar is: {GRAMMAR}")
    return Scene(items=tuple(items), relations=tuple(relations))


def write(scene: Scene) -> str:
    """Writes the sentence that states `scene`, the inverse of `parse`."""
    parts: list[str] = []
    for index, item in enumerate(scene.items):
        if index:
            stated = [r.name for r in scene.relations if r.second == index and r.first == index - 1]
            last = index == len(scene.items) - 1
            parts.append(f" {stated[0]} " if stated else " and " if last else ", ")
        words = ["a", item.size, item.colour, item.shape]
        parts.append(" ".join(word for word in words if word))
        if item.place:
            parts.append(f" at the {item.place}")
    return "".join(parts)


def _deep(value: float) -> bool:
    return any(low <= value <= high for low, high in BANDS)


def _main_relation(first: Thing, second: Thing) -> str | None:
    """Finds the relation along the longer axis, or None if the centres are too near for a clear statement."""
    name = max(RELATIONS, key=lambda r: relation_offset(r, first, second))
    return name if relation_offset(name, first, second) >= RELATION_OFFSET else None


def _relations(things: list[Thing], rng: np.random.Generator) -> tuple[Relation, ...]:
    """Draws no relation, or one per neighbouring pair, or (three objects) one between the first two."""
    last = len(things) - 1
    if rng.random() < (0.5 if last == 2 else 0.3):
        pairs = last if rng.random() < 0.55 else min(last, 1)
    else:
        pairs = last if last < 2 else int(rng.random() < 0.4)
    names = [_main_relation(things[i], things[i + 1]) for i in range(pairs)]
    return tuple(Relation(first=i, name=name, second=i + 1) for i, name in enumerate(names) if name)


def _facts(things: list[Thing], rng: np.random.Generator) -> Scene:
    mode = rng.random()
    sized = [mode < 0.5 or (mode > 0.8 and rng.random() < 0.5) for _ in things]
    placed = len(things) < 3 and all(_deep(t.x) and _deep(t.y) for t in things) and rng.random() < 0.7
    items = tuple(
        Item(colour=t.colour, shape=t.shape, size=t.size if s else None, place=t.place if placed else None)
        for t, s in zip(things, sized, strict=True)
    )
    return Scene(items=items, relations=() if placed else _relations(things, rng))


def describe(things: list[Thing], rng: np.random.Generator, *, fresh: bool = False) -> str | None:
    """Writes a caption that is true of `things`.

    Args:
        things: One to three placed objects.
        rng: Draws the order of mention and the facts that are mentioned.
        fresh: True for a held-out sentence, False for one that training may use.

    Returns:
        The caption, or None if ten draws gave no such caption.
    """
    for _ in range(10):
        order = rng.permutation(len(things))
        caption = write(_facts([things[int(i)] for i in order], rng))
        if held_out(caption) == fresh:
            return caption
    return None


def captions(num: int, seed: int) -> list[str]:
    """Draws fresh captions, none of which training has shown.

    Every caption is a function of (`seed`, its index) alone, and belongs to the eighth of the sentences (by checksum)
    that the training recipe leaves out.

    Args:
        num: How many.
        seed: Any non-negative integer.
    """
    return fresh_captions(num, 1, seed, lambda rng: describe(draw_things(rng), rng, fresh=True))


def fresh_captions(num: int, task: int, seed: int, draw: Callable[[np.random.Generator], str | None]) -> list[str]:
    """Draws captions as `captions` does: caption i is the first that `draw` makes with the noise of (task, seed, i)."""

    def one(rng: np.random.Generator) -> str:
        while (caption := draw(rng)) is None or not held_out(caption):
            pass
        return caption

    return [one(generator(task, seed, index)) for index in range(num)]
