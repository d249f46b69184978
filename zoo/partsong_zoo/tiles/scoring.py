"""Measures the `tiles` model on the shapes task: fresh captions, pictures by a rule, facts read back."""

from __future__ import annotations

import numpy as np

from partsong import seeds
from partsong.samplers.any_order import PictureRule
from partsong_zoo.shapes.grammar import captions
from partsong_zoo.shapes.reader import facts
from partsong_zoo.shapes.scoring import ShapesScore
from partsong_zoo.tiles.loading import TilesModel

__all__ = ["score_tiles"]


def score_tiles(
    loaded: TilesModel,
    rule: PictureRule,
    num: int = 200,
    *,
    seed: int = 0,
    batch: int = 40,
    guidance: float | None = None,
) -> ShapesScore:
    """Samples a picture for each of `num` fresh captions and reads the facts back.

    Args:
        loaded: the model.
        rule: how tokens are decided.
        num: how many captions.
        seed: draws captions, orders and tokens.
        batch: captions per call.
        guidance: how far to go beyond the captions' own logits; None takes what the model's settings say.

    Returns:
        Captions, pictures and facts.
    """
    texts, images = captions(num, seed), []
    for first in range(0, num, batch):
        asking = loaded.captioned(texts[first : first + batch], guidance)
        images.append(loaded.draw(rule.decode(asking, seed=seeds.derive(seed, "batch", first)).tokens))
    pictures = np.concatenate(images)
    held = [facts(text, image) for text, image in zip(texts, pictures, strict=True)]
    return ShapesScore(captions=texts, images=pictures, facts=held)
