"""The timestep pipeline: every rank makes its own denoising steps of one block of frames after another."""
