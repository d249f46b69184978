"""Offers small models that this repository's recipes trained, and the tasks they are measured on.

>>> from partsong import zoo
>>> pipe = zoo.load("shapes")
>>> image = pipe("a red circle left of a blue square", **zoo.MODELS["shapes"].defaults).images[0]
>>> zoo.shapes.facts_read("a red circle left of a blue square", image)
1.0
>>> model, tokenizer = zoo.load("lists-ar")
>>> ids = tokenizer("sort : dog ant cat =", return_tensors="pt").input_ids
>>> tokenizer.decode(model.generate(ids)[0, ids.shape[1] :], skip_special_tokens=True)
'ant cat dog'
"""

from partsong.zoo import lists, motion, products, shapes, sums
from partsong.zoo.registry import MODELS, TextPair, ZooModel, complete, load

__all__ = ["MODELS", "TextPair", "ZooModel", "complete", "lists", "load", "motion", "products", "shapes", "sums"]
