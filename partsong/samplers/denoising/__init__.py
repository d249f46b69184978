"""Plain sampler functions for a denoiser."""
