"""Keeps calls that engines in other processes answer, and asks again where such a process dies."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from partsong.reasoning.calls.call import Completion, Request
from partsong.reasoning.calls.engine import EngineError, Progress
from partsong.reasoning.calls.waiter import Waiter, in_loop
from partsong.reasoning.hosted.host import HostReport

__all__ = ["CallHolder", "LostError", "PlacedCall", "ask_until_answered", "hand_on"]

#: Times that a process may die during one call before it fails, so that a call that kills them does not do so for ever.
_MAX_LOSSES = 3


class LostError(EngineError):
    """Says that the process that had a call is gone; another one may answer it."""


@dataclass(kw_only=True, slots=True, eq=False)
class PlacedCall(Waiter):
    """Holds a request at an engine in another process, and the way back to the loop that waits for it.

    Attributes:
        number: number of the attempt; a call that is asked again gets a new one.
        request: the request.
        lost: tokens that earlier attempts had written.
        tokens: tokens that this attempt has written so far.
    """

    number: int
    request: Request
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


class CallHolder(Protocol):
    """Is what has a call: the driver's side of a process with an engine."""

    def cancel(self, call: PlacedCall) -> None:
        """Cancels a call; `PlacedCall.left` is set once the process has dropped it."""
        ...


async def ask_until_answered(
    request: Request,
    progress: Progress | None,
    numbers: Iterator[int],
    place: Callable[[PlacedCall], Awaitable[CallHolder]],
    places: str,
) -> Completion:
    """Answers a request; where the process that has it dies, it is asked again with the same seed.

    Args:
        request: the request.
        progress: called with new text, and with the end of an attempt.
        numbers: of attempts.
        place: hands a call to a process, and returns what has it then.
        places: what such processes are called in messages.

    Raises:
        EngineError: three died during the call.
    """
    lost = 0
    for losses in itertools.count(1):
        call = PlacedCall(number=next(numbers), request=request, progress=progress, lost=lost)
        holder = await place(call)
        try:
            completion = await call.answer(partial(holder.cancel, call))
            return replace(completion, usage=replace(completion.usage, wasted=completion.usage.wasted + lost))
        except LostError as error:
            if losses == _MAX_LOSSES:
                raise EngineError(f"the call was under way on {losses} {places} that died; the last: {error}") from None
            lost += call.tokens
            if progress is not None and call.tokens:
                progress("", lost, restart=True)
    raise AssertionError


def hand_on(
    calls: dict[int, PlacedCall], lock: threading.Condition | threading.RLock, news: Mapping[int, HostReport]
) -> None:
    """Passes reports to the loops that wait for calls, and removes those that have ended; `lock` guards them."""
    with lock:
        pairs = [(calls[number], report) for number, report in news.items() if number in calls]
        for call, report in pairs:
            if report.end is not None:
                del calls[call.number]
    for call, report in pairs:
        in_loop(call.loop, call.take, report)
