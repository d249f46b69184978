"""What a run asks of a language model, wherever it lives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from partsong.errors import PartsongError
from partsong.reasoning.calls.call import Completion, Request

__all__ = ["Engine", "EngineError", "Progress"]


class Progress(Protocol):
    """Told while a call runs."""

    def __call__(self, text: str, tokens: int, confidence: Sequence[float] = (), *, restart: bool = False) -> None:
        """Takes a report.

        Args:
            text: new since the last one.
            tokens: written so far.
            confidence: of the new tokens, as in `Completion`; empty where nobody asked for it.
            restart: the engine begins anew, and what it has told is void, though its tokens were spent.
        """
        ...


class EngineError(PartsongError, RuntimeError):
    """An engine could not answer: it is away, it refused, or what it sent back makes no sense."""


class Engine(Protocol):
    """Answers requests, many at a time.

    Attributes:
        name: tells engines apart in a journal: the model and how it is run.
    """

    name: str

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        """Answers one request.

        Cancelling the task ends the call at the engine as well, as far as it can be told.

        Raises:
            EngineError: no answer could be had.
        """
        ...

    async def close(self) -> None:
        """Gives back what the engine holds."""
        ...
