"""A pipeline's own call, paused at its denoiser, and checks of its scheduler."""
