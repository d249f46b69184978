"""Computes for an engine in a thread of its own, so that the loop of its callers stays free."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict

import torch

from partsong.errors import PartsongError
from partsong.reasoning.calls.engine import EngineError
from partsong.reasoning.local.scheduler import Scheduler, SchedulerReport
from partsong.reasoning.local.ticket import Ticket

__all__ = ["Worker"]


class Worker:
    """Runs a scheduler in a thread of its own as long as there are calls.

    Args:
        scheduler: the scheduler, which only that thread uses.
        name: the name of the thread.
    """

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._scheduler = scheduler
        self._wake = threading.Condition()
        self._arrived: list[Ticket] = []
        self._closing = False
        # Calls whose end has not been reported: if the model fails, they all end.
        self._live: set[Ticket] = set()
        # torch's number of threads is per thread; the caller's setting should hold here, too.
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Takes a call in.

        Raises:
            EngineError: the engine is closed.
        """
        with self._wake:
            if self._closing:
                raise EngineError("the engine is closed: make a new one")
            self._arrived.append(ticket)
            self._wake.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Cancels a call; its row leaves before the next step."""
        with self._wake:
            ticket.cancelled = True
            self._wake.notify()

    def close(self) -> None:
        """Ends the thread after the step it is in; running calls get an `EngineError`."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def join(self) -> None:
        """Waits for the thread's end, unless this is that thread: collecting garbage there may call this."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while self._wait():
                try:
                    news = self._scheduler.turn()
                except Exception as error:  # noqa: BLE001 - a model may raise errors of any kind, and nobody may be left waiting
                    self._fail(error)
                else:
                    self._live.difference_update(each.ticket for each in news if each.ended)
                    _report(news)
        self._fail(EngineError("the engine was closed while this call was under way"))

    def _wait(self) -> bool:
        """Waits for calls and takes them in; returns False once the engine is closed."""
        with self._wake:
            while not (self._closing or self._arrived or self._scheduler.tickets):
                self._wake.wait()
            self._scheduler.waiting.extend(self._arrived)
            self._live.update(self._arrived)
            self._arrived.clear()
            return not self._closing

    def _fail(self, error: Exception) -> None:
        tickets = list(self._live)
        self._live.clear()
        self._scheduler.reset()
        outcome: Exception = error
        if not isinstance(error, PartsongError):
            outcome = EngineError(f"the model could not go on, so all calls under way ended: {error!r}")
            outcome.__cause__ = error
        for ticket in tickets:
            _in_loop(ticket.loop, ticket.deliver, outcome)


def _report(news: list[SchedulerReport]) -> None:
    """Wakes each loop once, with all reports for it."""
    loops: defaultdict[asyncio.AbstractEventLoop, list[SchedulerReport]] = defaultdict(list)
    for each in news:
        if each.ended or each.ticket.progress is not None:
            loops[each.ticket.loop].append(each)
    for loop, reports in loops.items():
        _in_loop(loop, _deliver, reports)


def _deliver(news: list[SchedulerReport]) -> None:
    for each in news:
        if each.completion is not None or not each.ended:
            each.ticket.report(each.text, each.tokens, each.confidence)
        if each.ended:
            each.ticket.deliver(each.completion or each.error or EngineError("the call was cancelled"))


def _in_loop(loop: asyncio.AbstractEventLoop, function: object, argument: object) -> None:
    assert callable(function)
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        # The loop is closed, so no caller waits there.
        if not loop.is_closed():
            raise
