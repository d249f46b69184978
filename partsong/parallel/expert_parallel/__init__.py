"""Mixes separately trained denoisers, each on a rank of its own."""
