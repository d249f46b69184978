"""Runs the whole model on every rank, each on its own frames of a video."""
