"""Pauses a pipeline's own call at its denoiser, and checks its scheduler."""
