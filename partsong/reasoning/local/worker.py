"""Computes for an engine in a thread of its own, so that the loop of its callers stays free."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable

import torch

from partsong.errors import PartsongError
from partsong.reasoning.calls.call import Request
from partsong.reasoning.calls.engine import EngineError
from partsong.reasoning.calls.waiter import in_loop
from partsong.reasoning.local.lockstep import Lockstep, LockstepTurn
from partsong.reasoning.local.scheduler import Scheduler, SchedulerReport
from partsong.reasoning.local.ticket import Ticket, WaitingCaller

__all__ = ["Worker", "follow"]

_LOG = logging.getLogger(__name__)
#: Seconds after which an idle first rank shares a turn without calls.
_PULSE = 5.0


class Worker:
    """Runs a scheduler in a thread of its own as long as there are calls.

    Args:
        scheduler: the scheduler, which only that thread uses.
        name: the name of the thread.
        lockstep: takes the turns to the other ranks that share the model; None where there are none.
    """

    def __init__(self, scheduler: Scheduler, name: str, lockstep: Lockstep | None = None) -> None:
        self._scheduler, self._lockstep = scheduler, lockstep
        self._wake = threading.Condition()
        self._arrived: list[Ticket] = []
        self._cancelled: list[Ticket] = []
        self._closing = False
        #: What ended the thread before anybody closed it; None for nothing.
        self.failure: PartsongError | None = None
        # Calls whose end has not been reported: if the model fails, they all end.
        self._live: set[Ticket] = set()
        # torch's number of threads is per thread; the caller's setting should hold here, too.
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Takes a call in.

        Raises:
            EngineError: the engine is closed, or has lost its ranks.
        """
        with self._wake:
            if self.failure is not None:
                raise EngineError(f"the engine has ended: {self.failure}") from self.failure
            if self._closing:
                raise EngineError("the engine is closed: make a new one")
            self._arrived.append(ticket)
            self._wake.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Cancels a call; its row leaves before the next step."""
        with self._wake:
            self._cancelled.append(ticket)
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
            try:
                while self._wait():
                    self._turn()
            except PartsongError as error:  # the ranks are gone, or no longer agree
                with self._wake:
                    self.failure = error
                    self._live.update(self._arrived)
                self._fail(error)
        self._fail(EngineError("the engine was closed while this call was under way"))

    def _turn(self) -> None:
        try:
            news = self._scheduler.turn()
        except Exception as error:  # noqa: BLE001 - a model may raise errors of any kind, and nobody may be left waiting
            self._fail(error)
            if self._lockstep is not None:
                self._lockstep.note_failure()
        else:
            self._live.difference_update(each.ticket for each in news if each.ended)
            _report(news)

    def _wait(self) -> bool:
        """Waits for calls and takes them in; returns False once the engine is closed."""
        with self._wake:
            while not (self._closing or self._arrived or self._scheduler.tickets):
                if not self._wake.wait(None if self._lockstep is None else _PULSE):
                    break  # a turn without calls shows the other ranks that this one is there
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            self._scheduler.waiting.extend(arrived)
            self._live.update(arrived)
            ends = self._closing
        for ticket in cancelled:
            ticket.cancelled = True
        if self._lockstep is not None:
            new, gone = (
                tuple(each.caller.call for each in tickets if each.caller is not None)
                for tickets in (arrived, cancelled)
            )
            self._lockstep.share(LockstepTurn(new, tuple(call.number for call in gone), ends))
        return not ends

    def _fail(self, error: Exception) -> None:
        tickets = list(self._live)
        self._live.clear()
        self._scheduler.reset()
        outcome: Exception = error
        if not isinstance(error, PartsongError):
            outcome = EngineError(f"the model could not go on, so all calls under way ended: {error!r}")
            outcome.__cause__ = error
        for ticket in tickets:
            if ticket.caller is not None:
                in_loop(ticket.caller.loop, ticket.caller.deliver, outcome)


def follow(scheduler: Scheduler, lockstep: Lockstep, ticket_of: Callable[[Request, bool], Ticket]) -> None:
    """Takes the steps of the first rank's engine on another rank, until that engine is closed.

    Args:
        scheduler: that of this rank.
        lockstep: brings the turns of the first rank.
        ticket_of: makes a ticket of a request, and whether that is plain.

    Raises:
        DistributedError: a rank is gone, or the ranks no longer agree.
    """
    tickets: dict[int, Ticket] = {}
    with torch.inference_mode():
        while not (turn := lockstep.share(None)).ends:
            new = {call.number: ticket_of(call.request, call.plain) for call in turn.arrived}
            scheduler.waiting.extend(new.values())
            tickets |= new
            for number in turn.cancelled:
                if number in tickets:
                    tickets[number].cancelled = True
            try:
                ended = {each.ticket for each in scheduler.turn() if each.ended}
            except Exception:  # noqa: BLE001 - as on the first rank, which tells the callers
                _LOG.debug("a step failed", exc_info=True)
                scheduler.reset()
                lockstep.note_failure()
                tickets.clear()
            else:
                tickets = {number: each for number, each in tickets.items() if each not in ended}


def _report(news: list[SchedulerReport]) -> None:
    """Wakes each loop once, with all reports for it."""
    loops: defaultdict[asyncio.AbstractEventLoop, list[tuple[WaitingCaller, SchedulerReport]]] = defaultdict(list)
    for each in news:
        caller = each.ticket.caller
        if caller is not None and (each.ended or caller.progress is not None):
            loops[caller.loop].append((caller, each))
    for loop, reports in loops.items():
        in_loop(loop, _deliver, reports)


def _deliver(news: list[tuple[WaitingCaller, SchedulerReport]]) -> None:
    for caller, each in news:
        if each.completion is not None or not each.ended:
            caller.report(each.text, each.tokens, each.confidence)
        if each.ended:
            caller.deliver(each.completion or each.error or EngineError("the call was cancelled"))
