"""Defines a run's interface to a language model, in this process or anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from partsong.errors import PartsongError
from partsong.reasoning.calls.call import Completion, Request

__all__ = ["Engine", "EngineError", "Progress"]


class Progress(Protocol):
    """Takes reports while a call runs."""

    def __call__(self, text: str, tokens: int, confidence: Sequence[float] = (), *, restart: bool = False) -> None:
        """Takes a report.

        Args:
            text: text that is new since the last report.
            tokens: tokens written so far.
            confidence: confidence of the new tokens, as in `Completion`; empty where it was not asked for.
            restart: whether the engine starts over. The text reported so far is void, but its tokens were spent.
        """
        ...


class EngineError(PartsongError, RuntimeError):
    """Says that an engine could not answer: it is unreachable, it refused, or its reply makes no sense."""


class Engine(Protocol):
    """Answers requests, many at a time.

    Attributes:
        name: the model and how it is run; distinguishes engines in a journal.
    """

    name: str

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        """Answers one request.

        Cancelling the task ends the call at the engine as well, as far as the engine can be reached.

        Raises:
            EngineError: there is no answer.
        """
        ...

    async def close(self) -> None:
        """Frees the engine's resources."""
        ...
