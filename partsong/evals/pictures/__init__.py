"""Compares serial and parallel sampling of a model's pictures or videos, by the metrics that papers report."""
