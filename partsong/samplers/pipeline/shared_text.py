"""Encodes the prompts once for many calls of a pipeline: text encoders are large, and the prompts are the same."""

from __future__ import annotations

import itertools
from typing import Any

from partsong.parallel.hooks.replaced_method import Method, replace_method
from partsong.samplers.pipeline.paused import PausedCall

__all__ = ["SharedText"]


class SharedText:
    """Lets the first call encode, and gives its embeddings to the others."""

    def __init__(self) -> None:
        self._embeddings: list[Any] = []

    def join(self, call: PausedCall) -> None:
        """Adds a call that has not begun; does nothing for a pipeline without text."""
        if hasattr(call.pipe, "encode_prompt"):
            replace_method(call.pipe, "encode_prompt", self._encoding_once)

    def _encoding_once(self, encode: Method) -> Method:
        numbers = itertools.count()

        def encode_once(*args: Any, **kwargs: Any) -> Any:
            number = next(numbers)
            if number == len(self._embeddings):
                self._embeddings.append(encode(*args, **kwargs))
            return self._embeddings[number]

        return encode_once
