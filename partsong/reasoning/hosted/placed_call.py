"""Keeps a call that an engine in another process answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from partsong.reasoning.calls.call import Completion, Request
from partsong.reasoning.calls.engine import EngineError, Progress
from partsong.reasoning.hosted.host import HostReport

__all__ = ["LostError", "PlacedCall", "in_loop"]


class LostError(EngineError):
    """Says that the process that had a call is gone; another one may answer it."""


@dataclass(slots=True, eq=False)
class PlacedCall:
    """Holds a request at an engine in another process, and the way back to the loop that waits for it.

    Attributes:
        number: number of the attempt; a call that is asked again gets a new one.
        left: set once the engine no longer works on the call.
        lost: tokens that earlier attempts had written.
        tokens: tokens that this attempt has written so far.
    """

    number: int
    request: Request
    future: asyncio.Future[Completion]
    left: asyncio.Event
    progress: Progress | None
    lost: int = 0
    tokens: int = 0

    def take(self, news: HostReport) -> None:
        """Passes reports on one by one, in the loop, so a halt happens at the same token as with a local engine."""
        for report in news.reports:
            if self.future.done():  # the last report halted or cancelled the call
                break
            self.tokens = report.tokens
            if self.progress is not None:
                tokens = self.lost + report.tokens
                self.progress(report.text, tokens, report.confidence, restart=report.restart)
        if news.end is not None:
            self.deliver(news.end)

    def deliver(self, end: Completion | Exception) -> None:
        """Ends the call, in the loop."""
        self.left.set()
        if self.future.done():
            return
        if isinstance(end, Completion):
            self.future.set_result(end)
        else:
            self.future.set_exception(end)


def in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Calls a function in a loop; does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
