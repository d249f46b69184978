"""Measures strategies of `partsong.reasoning`: tasks, samples on disk, tables with intervals. Loads no torch."""
