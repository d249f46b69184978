"""Brings partsong's small trained models, their tasks, and the code that trained them; `partsong.zoo` is its door."""

from partsong_zoo import lists, motion, products, shapes, sums

__version__ = "0.1.0"

__all__ = ["lists", "motion", "products", "shapes", "sums"]
