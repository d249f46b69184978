"""A call under way: what has come of it so far, and whether that is enough."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from partsong.reasoning.calls.call import Completion, Usage
from partsong.reasoning.calls.graph import CallNode

__all__ = ["Partial", "UnderWay"]


@dataclass(slots=True)
class Partial:
    """What has come of a call so far.

    Attributes:
        text: of the answer.
        tokens: written.
        confidence: by token, where it was asked for.
    """

    text: str = ""
    tokens: int = 0
    confidence: list[float] = field(default_factory=list)

    def as_completion(self) -> Completion:
        """The completion of a call that was halted here."""
        usage = Usage(completion=self.tokens, reported=False)
        confidence = tuple(self.confidence) if self.confidence else None
        return Completion(text=self.text, finish="halted", usage=usage, confidence=confidence)


@dataclass(slots=True)
class UnderWay:
    """Takes an engine's reports of one call.

    Attributes:
        node: the call.
        note: told of it, the new text and the tokens so far.
        halt: whether what has come is enough.
        task: the engine's, cancelled when it is.
        seen: what has come.
        halted: it was enough.
    """

    node: CallNode
    note: Callable[[CallNode, str, int], None]
    halt: Callable[[Partial], bool] | None = None
    task: asyncio.Task[Completion] | None = None
    seen: Partial = field(default_factory=Partial)
    halted: bool = False

    def __call__(self, text: str, tokens: int, confidence: Sequence[float] = (), *, restart: bool = False) -> None:
        """A report; see `Progress`."""
        self.note(self.node, text, tokens)
        if self.halt is None or self.halted:
            return
        if restart:
            self.seen = Partial()
        self.seen.text, self.seen.tokens = self.seen.text + text, tokens
        self.seen.confidence += confidence
        if self.halt(self.seen):
            self.halted = True
            assert self.task is not None
            self.task.cancel()
