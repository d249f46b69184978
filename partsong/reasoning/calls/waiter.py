"""Waits in an event loop for an answer that another thread or process makes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from partsong.reasoning.calls.call import Completion
from partsong.reasoning.calls.engine import Progress

__all__ = ["Waiter", "in_loop"]


def _future() -> asyncio.Future[Completion]:
    return asyncio.get_running_loop().create_future()


@dataclass(kw_only=True, slots=True, eq=False)
class Waiter:
    """Waits for the answer to one call; it is made in the loop of its caller.

    Attributes:
        progress: called with new text.
        future: takes the completion.
        left: set once nobody works on the call any more.
    """

    progress: Progress | None = None
    future: asyncio.Future[Completion] = field(default_factory=_future)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Returns the loop in which it waits."""
        return self.future.get_loop()

    async def answer(self, cancel: Callable[[], None]) -> Completion:
        """Waits for the answer; a caller that is cancelled leaves when the call has been dropped.

        Args:
            cancel: asks for that. A second cancellation does not wait for it.
        """
        try:
            return await self.future
        except asyncio.CancelledError:
            cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.left.wait()
            raise

    def deliver(self, end: Completion | Exception) -> None:
        """Ends the call; runs in the loop."""
        self.left.set()
        if self.future.done():
            return
        if isinstance(end, Completion):
            self.future.set_result(end)
        else:
            self.future.set_exception(end)


def in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Calls a function in a loop, from any thread; does nothing if the loop is closed, where no caller waits."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
