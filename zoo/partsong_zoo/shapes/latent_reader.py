"""Reads facts from latents with a small network that is trained for it, so that they have a gradient.

It serves recipes that train few-step models; pictures are judged by `partsong_zoo.shapes.reader`, in which nothing is
learned. Importing this module loads torch; only recipes import it.

Source of the idea, a loss that rewards samples: reward-guided consistency distillation, arXiv 2403.11027.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partsong_zoo.shapes.comprehension import ATTRIBUTES, text_targets
from partsong_zoo.shapes.scenes import (
    COLOURS,
    EXTENT,
    RELATION_OFFSET,
    RELATIONS,
    SHAPES,
    SIZES,
    Thing,
    relation_offset,
)

__all__ = ["FACTS", "LatentReader", "asked_facts", "fact_loss", "scene_facts", "with_another"]

_COLOURS = tuple(COLOURS)
#: Facts of a scene: for every colour its object's attributes, the last of which says that it is there; for pairs of
#: colours their relations; and for every colour whether there is more than one object.
FACTS = len(_COLOURS) * (len(ATTRIBUTES) + 1) + len(_COLOURS) ** 2 * len(RELATIONS) + len(_COLOURS)
#: Attributes that exclude each other: shapes, sizes and places.
_GROUPS = (
    slice(0, len(SHAPES)),
    slice(len(SHAPES), len(SHAPES) + len(SIZES)),
    slice(len(SHAPES) + len(SIZES), len(ATTRIBUTES)),
)


def with_another(things: Sequence[Thing], rng: np.random.Generator) -> list[Thing]:
    """Adds to a scene an object that no picture would have, but that samples of few steps often have.

    In half of the scenes there is an object of its colour already. It is often smaller than usual, and it may partly
    cover objects of other colours.
    """
    model = things[int(rng.integers(len(things)))]
    colour = model.colour if rng.random() < 0.5 else _COLOURS[int(rng.integers(len(_COLOURS)))]
    shape = model.shape if rng.random() < 0.7 else SHAPES[int(rng.integers(len(SHAPES)))]
    radius = float(rng.choice((rng.uniform(2.0, 5.5), model.radius)))
    while True:
        x, y = (float(place) for place in rng.uniform(radius, EXTENT - radius, 2))
        same = [thing for thing in things if thing.colour == colour]
        if all(max(abs(x - thing.x), abs(y - thing.y)) > radius + thing.radius for thing in same):
            return [*things, Thing(colour=colour, shape=shape, x=x, y=y, radius=radius)]


def scene_facts(scenes: Sequence[Sequence[Thing]]) -> Tensor:
    """Tells which facts hold in scenes: 0 or 1, `[scenes, FACTS]`; objects of one colour pool their attributes."""
    table = torch.zeros(len(scenes), len(_COLOURS), len(ATTRIBUTES) + 1)
    pairs = torch.zeros(len(scenes), len(_COLOURS), len(_COLOURS), len(RELATIONS))
    more = torch.zeros(len(scenes), len(_COLOURS))
    for row, things in enumerate(scenes):
        for thing in things:
            mine = table[row, _COLOURS.index(thing.colour)]
            more[row, _COLOURS.index(thing.colour)] = mine[-1]
            mine[-1] = 1
            for word in (thing.shape, thing.size, thing.place):
                mine[ATTRIBUTES.index(word)] = 1
            for other in things:
                for index, name in enumerate(RELATIONS):
                    held = relation_offset(name, thing, other) >= RELATION_OFFSET
                    if held:
                        pairs[row, _COLOURS.index(thing.colour), _COLOURS.index(other.colour), index] = 1
    return torch.cat([table.flatten(1), pairs.flatten(1), more], dim=1)


def asked_facts(captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Tells which facts captions ask for.

    Args:
        captions: sentences of the grammar.

    Returns:
        What should hold, 0 or 1, and which facts a caption decides, 0 or 1; `[captions, FACTS]` each. A caption
        decides for every colour whether it is there and that it is not there twice; for every object it names, the
        shape; and the sizes, places and relations it states.

    >>> wanted, decided = asked_facts(["a red circle"])
    >>> int(wanted.sum()), int(decided.sum())
    (2, 16)
    """
    table, pairs = text_targets(list(captions))
    decided = torch.zeros_like(table)
    decided[..., -1] = 1
    for group in _GROUPS:
        decided[..., group] = table[..., group].amax(dim=-1, keepdim=True)
    more = torch.zeros(len(captions), len(_COLOURS))
    return (
        torch.cat([table.flatten(1), pairs.flatten(1), more], dim=1),
        torch.cat([decided.flatten(1), pairs.flatten(1), more + 1], dim=1),
    )


def fact_loss(logits: Tensor, wanted: Tensor, decided: Tensor) -> Tensor:
    """Computes how far a reading is from what captions want, `[batch]`: the sum of surprises, in nats.

    Args:
        logits: a reading, `[batch, FACTS]`.
        wanted: as `asked_facts` returns it, on the same device.
        decided: likewise.
    """
    return (F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") * decided).sum(dim=1)


class LatentReader(nn.Module):
    """Tells the facts of a scene from its latents, at any noise level up to one radian.

    Convolutions describe every place. For each colour, attention gathers a description of its object. From it the
    object's attributes are read, and from those of two colours how their objects are placed. From the mean over all
    places it is read how many objects a colour has.

    Args:
        width: channels inside, a multiple of 8.

    Example:
        >>> LatentReader(width=16)(torch.zeros(2, 4, 16, 16), torch.zeros(2)).shape == (2, FACTS)
        True
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(7, width, 3, padding=1)
        self.blocks = nn.ModuleList(_convolutions(width) for _ in range(3))
        self.halve = nn.Conv2d(width, width, 2, stride=2)
        self.colours = nn.Conv2d(width, len(_COLOURS), 1)
        self.attributes = _perceptron(width, len(ATTRIBUTES) + 1)
        self.relations = _perceptron(2 * width, len(RELATIONS))
        self.more = _perceptron(width, len(_COLOURS))

    def forward(self, latents: Tensor, time: Tensor) -> Tensor:
        """Returns the logit of every fact, `[batch, FACTS]`.

        Args:
            latents: points of the trigonometric path, `[batch, 4, 16, 16]`.
            time: their times in radians, `[batch]`.
        """
        side = torch.linspace(-1, 1, latents.shape[-1], device=latents.device).expand_as(latents[:, :1])
        level = time.view(-1, 1, 1, 1).expand_as(side)
        features = self.stem(torch.cat([latents, side, side.transpose(2, 3), level], dim=1))
        features = self.halve(features + self.blocks[0](features))
        for block in self.blocks[1:]:
            features = features + block(features)
        attention = self.colours(features).flatten(2).softmax(dim=-1)
        objects = attention @ features.flatten(2).transpose(1, 2)  # [batch, colours, width]
        pairs = torch.cat(
            [each.expand(-1, *[len(_COLOURS)] * 2, -1) for each in (objects[:, :, None], objects[:, None])], -1
        )
        facts = [self.attributes(objects).flatten(1), self.relations(pairs).flatten(1)]
        return torch.cat([*facts, self.more(features.flatten(2).mean(dim=-1))], dim=1)


def _convolutions(width: int) -> nn.Sequential:
    layers = [(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)]
    return nn.Sequential(*layers[0], *layers[1])


def _perceptron(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, outputs))
