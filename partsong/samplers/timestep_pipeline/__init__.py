"""Samples with a timestep pipeline: every rank makes its own denoising steps of one block after another."""
