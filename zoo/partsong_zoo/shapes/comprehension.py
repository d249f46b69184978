"""Teaches the text encoders of `shapes` to tell the facts of a caption, before they see any picture.

Importing this module loads torch; only the recipe imports it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partsong_zoo.shapes.grammar import parse
from partsong_zoo.shapes.model import TEXT_WIDTH, VOCABULARY, TextEncoders, token_ids
from partsong_zoo.shapes.scenes import COLOURS, PLACES, RELATIONS, SHAPES, SIZES

ATTRIBUTES = (*SHAPES, *SIZES, *PLACES)


def build_heads() -> nn.ModuleDict:
    """Builds linear read-outs: all facts from pooled features, an object's attributes from its shape word's token."""
    facts = len(COLOURS) * (len(ATTRIBUTES) + 1) + len(COLOURS) ** 2 * len(RELATIONS)
    own = len(COLOURS) + len(SHAPES) + len(SIZES)
    return nn.ModuleDict({"pooled": nn.Linear(TEXT_WIDTH, facts), "token": nn.Linear(TEXT_WIDTH, own)})


def text_targets(captions: list[str]) -> tuple[Tensor, Tensor]:
    """Encodes facts: attributes by colour `[batch, 6, 16]` (the last: mentioned) and relations `[batch, 6, 6, 4]`."""
    colours = list(COLOURS)
    table = torch.zeros(len(captions), len(colours), len(ATTRIBUTES) + 1)
    pairs = torch.zeros(len(captions), len(colours), len(colours), len(RELATIONS))
    for row, caption in enumerate(captions):
        scene = parse(caption)
        rows = [colours.index(item.colour) for item in scene.items]
        for index, item in zip(rows, scene.items, strict=True):
            table[row, index, -1] = 1
            for word in (item.shape, item.size, item.place):
                if word:
                    table[row, index, ATTRIBUTES.index(word)] = 1
        for r in scene.relations:
            pairs[row, rows[r.first], rows[r.second], RELATIONS.index(r.name)] = 1
    return table, pairs


def text_loss(text: TextEncoders, heads: nn.ModuleDict, captions: list[str]) -> tuple[Tensor, float]:
    """Computes the loss of telling facts from pooled features, and attributes from shape words; also the accuracy."""
    device = next(text.parameters()).device
    ids = token_ids(captions).to(device)
    table, pairs = (t.to(device) for t in text_targets(captions))
    tokens, pooled = text(ids)
    facts = torch.cat([table.flatten(1), pairs.flatten(1)], dim=1)
    logits = heads["pooled"](pooled)
    weight = torch.tensor(4.0, device=device)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, facts, pos_weight=weight)
    nouns = torch.isin(ids, torch.tensor([VOCABULARY[s] for s in SHAPES], device=device))
    own = heads["token"](tokens[nouns])
    # Objects are mentioned in the order of their nouns, so flattening the facts by object lines up with the nouns.
    colours = [list(COLOURS).index(i.colour) for c in captions for i in parse(c).items]
    target = nn.functional.one_hot(torch.tensor(colours, device=device), len(COLOURS)).float()
    rows = nouns.nonzero()[:, 0]
    mine = table[rows, torch.tensor(colours, device=device)][:, : len(SHAPES) + len(SIZES)]
    loss = loss + 0.3 * nn.functional.binary_cross_entropy_with_logits(own, torch.cat([target, mine], dim=1))
    return loss, float(((logits > 0) == (facts > 0.5)).all(dim=1).float().mean())
