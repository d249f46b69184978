"""Runs engines on a Ray cluster. Importing this loads neither Ray nor torch; making an engine does."""

from partsong.reasoning.cluster.engine import RayEngine

__all__ = ["RayEngine"]
