"""Cuts a model's input over ranks: by tokens, rows, samples or layers."""
