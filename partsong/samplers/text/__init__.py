"""Parallel decoding of text: one loop for masked, block-diffusion and causal language models."""
