"""Runs a transformers model in this process as an engine. Importing this package loads torch and transformers."""

from partsong.reasoning.local.engine import LocalEngine

__all__ = ["LocalEngine"]
