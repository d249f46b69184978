"""Reads from a model folder the part of the weights that one rank needs."""
