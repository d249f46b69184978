"""Engines around an engine: one that lets so many calls in at a time, one that puts a chat before every prompt."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import replace

from partsong.errors import ArgumentError
from partsong.reasoning.calls.call import Completion, Message, Request
from partsong.reasoning.calls.engine import Engine, Progress

__all__ = ["BoundedEngine", "ChatEngine"]


class BoundedEngine:
    """Lets at most so many calls reach an engine at a time, whichever runs they belong to; the others wait in turn.

    A `Run` bounds its own calls. Many runs at once, one for each problem, need a bound for all of them.

    Args:
        engine: answers.
        concurrency: most calls under way; positive.

    Attributes:
        name: the engine's: what is answered does not depend on the bound.

    Raises:
        ArgumentError: a bound that is none.

    >>> from partsong.reasoning import Line, ScriptedEngine
    >>> four = BoundedEngine(ScriptedEngine(lambda request, draw: Line(text="4")), 2)
    >>> asyncio.run(four.generate(Request(messages=()))).text
    '4'
    """

    def __init__(self, engine: Engine, concurrency: int) -> None:
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise ArgumentError(f"concurrency={concurrency!r}; use a positive integer")
        self.engine, self.concurrency, self.name = engine, concurrency, engine.name
        # A semaphore belongs to the loop that waits at it, and an engine may be asked from one loop after the other.
        self._gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._gates = weakref.WeakKeyDictionary()

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        """Answers one request when its turn has come; see `Engine`."""
        gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        async with gate:
            return await self.engine.generate(request, progress)

    async def close(self) -> None:
        """Closes the engine."""
        await self.engine.close()


class ChatEngine:
    """Puts the same messages before every prompt, so that a strategy, which asks a question, can answer in a chat.

    Args:
        engine: answers.
        before: the chat so far: a system message, earlier turns.

    Attributes:
        name: the engine's. Whoever keeps a journal gives runs after different chats different names.

    >>> from partsong.reasoning import Line, ScriptedEngine
    >>> echo = ScriptedEngine(lambda request, draw: Line(text=" | ".join(m.text for m in request.messages)))
    >>> after = ChatEngine(echo, [Message("system", ("Be brief.",))])
    >>> asyncio.run(after.generate(Request(messages=(Message("user", ("3 + 4?",)),)))).text
    'Be brief. | 3 + 4?'
    """

    def __init__(self, engine: Engine, before: Sequence[Message]) -> None:
        self.engine, self.before, self.name = engine, tuple(before), engine.name

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        """Answers one request after the chat; see `Engine`."""
        return await self.engine.generate(replace(request, messages=(*self.before, *request.messages)), progress)

    async def close(self) -> None:
        """Closes the engine."""
        await self.engine.close()
