"""Wraps engines: one wrapper bounds the concurrent calls, one puts a chat before every prompt."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import replace

from partsong.knobs import Count, check_knobs, type_hints
from partsong.reasoning.calls.call import Completion, Message, Request
from partsong.reasoning.calls.engine import Engine, Progress

__all__ = ["BoundedEngine", "ChatEngine"]


class BoundedEngine:
    """Bounds how many calls reach an engine at the same time; the others wait in turn.

    A `Run` bounds its own calls. Many runs at once, one for each problem, need one bound for all of them.

    Args:
        engine: answers the calls.
        concurrency: most calls at the same time.

    Attributes:
        name: the engine's name, because answers do not depend on the bound.

    Raises:
        ArgumentError: `concurrency` is not a positive integer.

    >>> from partsong.reasoning import Line, ScriptedEngine
    >>> four = BoundedEngine(ScriptedEngine(lambda request, draw: Line(text="4")), 2)
    >>> asyncio.run(four.generate(Request(messages=()))).text
    '4'
    """

    def __init__(self, engine: Engine, concurrency: Count) -> None:
        check_knobs(type_hints(BoundedEngine.__init__), {"concurrency": concurrency})
        self.engine, self.concurrency, self.name = engine, concurrency, engine.name
        # A semaphore belongs to the loop that waits at it, and an engine may be asked from one loop after another.
        self._gates = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        """Answers one request when its turn comes; see `Engine`."""
        gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        async with gate:
            return await self.engine.generate(request, progress)

    async def close(self) -> None:
        """Closes the engine."""
        await self.engine.close()


class ChatEngine:
    """Puts the same messages before every prompt, so that a thinking method can answer in a chat.

    Args:
        engine: answers the calls.
        before: the chat so far: a system message, earlier turns.

    Attributes:
        name: the engine's name. With a journal, give runs after different chats different names.

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
