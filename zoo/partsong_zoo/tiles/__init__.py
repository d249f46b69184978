"""Holds the `tiles` model: pictures of `shapes` as 8 x 8 tokens, and a transformer that decides them in any order."""

__all__ = ["PICTURES"]

#: The folder of the picture tokenizer inside the model's.
PICTURES = "pictures"
