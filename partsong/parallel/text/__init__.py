"""Runs language models of transformers over ranks."""
