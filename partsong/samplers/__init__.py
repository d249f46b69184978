"""Loops: what turns a model and a schedule into a sample."""

from partsong.samplers.generate import generate

__all__ = ["generate"]
