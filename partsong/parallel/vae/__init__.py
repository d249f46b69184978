"""Shares the work of the autoencoder out over ranks."""
