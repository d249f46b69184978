"""Defines the task of the `shapes` model: fresh captions, their facts, pictures of them, and a reader of pictures.

`captions` draws sentences that training has not shown, `parse` tells a sentence's facts, `render` draws them, `read`
finds the objects of a picture and `facts` / `facts_read` tell which of a caption's facts hold: the quality metric.
"""

from partsong_zoo.shapes.drawing import paint, render
from partsong_zoo.shapes.grammar import GRAMMAR, captions, parse
from partsong_zoo.shapes.reader import facts, facts_read, read
from partsong_zoo.shapes.scenes import Item, Relation, Scene, Thing
from partsong_zoo.shapes.scoring import ShapesScore, score

__all__ = [
    "GRAMMAR",
    "Item",
    "Relation",
    "Scene",
    "ShapesScore",
    "Thing",
    "captions",
    "facts",
    "facts_read",
    "paint",
    "parse",
    "read",
    "render",
    "score",
]
