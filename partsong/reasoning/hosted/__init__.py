"""Runs engines in other processes. Importing this loads no torch; making an engine does."""

from partsong.reasoning.hosted.ranks_engine import RanksEngine

__all__ = ["RanksEngine"]
