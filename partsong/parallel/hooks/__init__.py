"""Puts removable hooks on a user's modules, and keeps the clock that tracks the progress of a generation."""
