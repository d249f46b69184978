"""Small models trained by this repository's recipes and shipped with it, and the tasks they are measured on.

>>> from partsong import zoo
>>> pipe = zoo.load("shapes")
>>> image = pipe("a red circle left of a blue square", **zoo.MODELS["shapes"].defaults).images[0]
>>> zoo.shapes.facts_read("a red circle left of a blue square", image)
1.0
"""

from partsong.zoo import motion, shapes
from partsong.zoo.registry import MODELS, ZooModel, load

__all__ = ["MODELS", "ZooModel", "load", "motion", "shapes"]
