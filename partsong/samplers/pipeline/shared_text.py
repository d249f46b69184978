"""One encoding of the prompts for many calls of a pipeline: text encoders are large, and the prompts are the same."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from partsong.samplers.pipeline.paused import PausedCall

__all__ = ["SharedText"]


class SharedText:
    """Lets the first call that asks encode, and hands its embeddings to the others."""

    def __init__(self) -> None:
        self._done: list[Any] = []

    def join(self, call: PausedCall) -> None:
        """Makes a call that has not begun take part; one of a pipeline without text is left as it is."""
        original = getattr(call.pipe, "encode_prompt", None)
        if original is None:
            return
        numbers = itertools.count()

        def encode(*args: Any, **kwargs: Any) -> Any:
            number = next(numbers)
            if number == len(self._done):
                self._done.append(original(*args, **kwargs))
            return self._done[number]

        vars(call.pipe)["encode_prompt"] = functools.wraps(original)(encode)
