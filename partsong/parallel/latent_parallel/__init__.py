"""Runs the whole model on overlapping parts of the latent, in each step along another dimension."""
