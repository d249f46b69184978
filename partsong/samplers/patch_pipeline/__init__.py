"""Samples with PipeFusion: patches of the picture travel through stages of blocks."""
