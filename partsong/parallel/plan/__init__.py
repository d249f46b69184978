"""Attaches strategies to a pipeline, and predicts what they will move."""
