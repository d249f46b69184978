"""Splits the heads and the feed-forward columns of a model's layers over ranks."""
