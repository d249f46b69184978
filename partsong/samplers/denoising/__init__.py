"""Samples with plain functions of a denoiser."""
