"""Clip parallelism: every rank runs the whole model on its own frames of a video."""
