"""Runs on every rank of a replica: keeps paused calls of a pipeline, and makes their steps together."""
