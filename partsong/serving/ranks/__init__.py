"""Runs on every rank of a group: keeps calls of a pipeline paused, and makes their steps together."""
