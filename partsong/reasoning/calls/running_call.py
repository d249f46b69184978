"""Follows a call while it runs: collects its text so far and asks whether that is enough."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from partsong.reasoning.calls.call import Completion, Usage
from partsong.reasoning.calls.graph import CallNode

__all__ = ["Halt", "Partial", "RunningCall"]


@dataclass(slots=True)
class Partial:
    """Holds the part of an answer received so far, with the confidence by token if requested."""

    text: str = ""
    tokens: int = 0
    confidence: list[float] = field(default_factory=list)

    def as_completion(self) -> Completion:
        """Returns the completion of a call that was halted here."""
        usage = Usage(completion=self.tokens, reported=False)
        confidence = tuple(self.confidence) if self.confidence else None
        return Completion(text=self.text, finish="halted", usage=usage, confidence=confidence)


#: Returns whether enough of an answer was read.
Halt = Callable[[Partial], bool]


@dataclass(slots=True)
class RunningCall:
    """Takes an engine's reports of one call, and cancels the engine's task when the answer so far is enough."""

    node: CallNode
    on_progress: Callable[[CallNode, str, int], None]
    halt: Halt | None = None
    task: asyncio.Task[Completion] | None = None
    partial: Partial = field(default_factory=Partial)
    halted: bool = False

    def __call__(self, text: str, tokens: int, confidence: Sequence[float] = (), *, restart: bool = False) -> None:
        """Takes a report; see `Progress`."""
        self.on_progress(self.node, text, tokens)
        if self.halt is None or self.halted:
            return
        if restart:
            self.partial = Partial()
        self.partial.text, self.partial.tokens = self.partial.text + text, tokens
        self.partial.confidence += confidence
        if self.halt(self.partial):
            self.halted = True
            assert self.task is not None
            self.task.cancel()
