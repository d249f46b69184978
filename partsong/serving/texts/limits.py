"""Bounds what one request for text may ask for, and how many may run at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partsong.knobs import AboveZero, Count, Knobs
from partsong.serving.errors import ApiError

__all__ = ["TextLimits"]

#: Knobs that count tokens; all other whole numbers of a strategy count calls, rounds or threads.
_COUNT_TOKENS = ("group",)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLimits(Knobs):
    """Holds the bounds of a served text model.

    Attributes:
        max_tokens: most tokens that a request may ask for in one answer.
        default_tokens: tokens of an answer where the request names no number.
        max_messages: most messages of a chat.
        max_characters: most characters of all messages together.
        max_knob: largest number that a strategy may be given for its samples, rounds or threads.
        max_calls: most calls of one request; a strategy ends there as if its budget were spent.
        max_in_flight: most requests at once; further ones are refused until one has ended.
        keep_alive: seconds of silence after which a stream sends a comment.
        start_seconds: how long a request waits for a process that is starting.
    """

    max_tokens: Count = 8192
    default_tokens: Count = 512
    max_messages: Count = 256
    max_characters: Count = 400_000
    max_knob: Count = 256
    max_calls: Count = 1024
    max_in_flight: Count = 64
    keep_alive: AboveZero = 5.0
    start_seconds: AboveZero = 120.0

    def check_strategy(self, knobs: Mapping[str, Any]) -> None:
        """Refuses knobs of a strategy that would make too many calls.

        Raises:
            ApiError: names the knob.
        """
        for name, value in knobs.items():
            is_length = name.endswith("_tokens") or name in _COUNT_TOKENS
            top = max(self.max_tokens, 4096) if is_length else self.max_knob
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(number, int) and number > top for number in numbers):
                raise ApiError(400, f"{name}={value}: this server allows {top} at most; ask for fewer", param="model")
