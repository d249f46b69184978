"""Attaches strategies to a pipeline, and says beforehand what they will move."""
