"""Solves for several steps of a generation at the same time."""
