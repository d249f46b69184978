"""Decides on a replica's first rank what all of its ranks do next."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from partsong.serving.messages import (
    Cancel,
    DenoiseCall,
    JobCancelled,
    JobReturned,
    JobWork,
    Stop,
    Submit,
    ToDesk,
)
from partsong.serving.ranks.orders import Orders
from partsong.serving.turns import Shares, Standing, choose, entry_time

__all__ = ["Desk"]

#: Seconds that a job of another setting, or one without room, waits before no later job may overtake it.
_PATIENCE = 5.0
#: Recent jobs kept to recognise repeats: far more than a server sends while it does not know the ranks' state.
_REMEMBERED = 4096

_Setting = tuple[tuple[str, ...], str | None]


class Desk:
    """Keeps the jobs of a replica in order.

    Jobs whose strategies keep nothing between steps take turns, as many at once as fit into memory by what the planner
    predicts, all under one setting of the model. Any other job runs by itself, from start to end, and so does a session
    until its client closes it or makes no calls any more. When the running jobs are done, the next job in the queue
    decides the next setting of the model. In the queue users take turns, each with the oldest of their jobs.

    Args:
        can_join: says whether a job can take turns with others.
        max_rows: most samples in one call of the model.
        max_active: most jobs that take turns.
        room: bytes that a rank may take; None for no bound.

    Attributes:
        waiting: jobs that have not begun, by arrival.
        standings: places in the order, of the jobs that take turns.
        session: the one that has the ranks; None for none.
    """

    def __init__(
        self, can_join: Callable[[JobWork], bool], *, max_rows: int, max_active: int, room: int | None = None
    ) -> None:
        self.waiting: list[JobWork] = []
        self.standings: dict[str, Standing] = {}
        self.session: JobWork | None = None
        self._calls: list[DenoiseCall] = []
        self._called = 0.0  # when the session was last opened or answered, by `time.monotonic`
        self._can_join, self._max_rows, self._max_active = can_join, max_rows, max_active
        self._room = room
        self._shares = Shares()
        self._setting: _Setting | None = None
        self._arrivals = itertools.count()
        self._since: dict[str, tuple[int, float]] = {}
        self._known: dict[str, None] = {}  # the latest jobs to arrive, the oldest first
        self._dropped: list[str] = []
        self._ends = False

    @property
    def is_idle(self) -> bool:
        """Says whether there is nothing to do."""
        work = self.standings or self.waiting if self.session is None else self._calls
        return not (work or self._dropped or self._ends)

    def take(self, message: ToDesk) -> JobCancelled | JobReturned | None:
        """Notes what the server asks for; returns the message about a job that leaves before it began."""
        if isinstance(message, Stop):
            self._ends = True
        elif isinstance(message, DenoiseCall):
            if self._has_session(message.id):  # the server has been notified of the end of any other
                self._calls.append(message)
        elif isinstance(message, Submit):
            if message.work.id not in self._known:  # a server repeats what may not have arrived
                self._known[message.work.id] = None
                if len(self._known) > _REMEMBERED:
                    self._known.pop(next(iter(self._known)))
                present = {each.user for each in (*self.waiting, *self.standings.values())}
                if message.work.user not in present:
                    self._shares.arrive(message.work.user, present)
                self.waiting.append(message.work)
                self._since[message.work.id] = next(self._arrivals), time.monotonic()
        elif any(work.id == message.id for work in self.waiting):
            self.waiting = [work for work in self.waiting if work.id != message.id]
            self._since.pop(message.id)
            if isinstance(message, Cancel):
                return JobCancelled(message.id)
            self._known.pop(message.id)  # it may come back
            return JobReturned(message.id)
        elif isinstance(message, Cancel) and (message.id in self.standings or self._has_session(message.id)):
            self._dropped.append(message.id)
        return None

    def orders(self) -> Orders:
        """Returns what the ranks do next, and counts it as done."""
        if self._ends:
            return Orders(ends=True)
        if self.session is not None and not self._calls:
            pause = time.monotonic() - self._called
            if pause > (self.session.pause or 0.0):
                self._dropped.append(self.session.id)
        dropped, self._dropped = tuple(self._dropped), []
        for name in dropped:
            self.forget(name)
        if self.session is not None:
            return Orders(dropped=dropped, call=self._calls.pop(0) if self._calls else None)
        queue = self._shares.order(self.waiting, self.standings.values()) if self.waiting else []
        if not self.standings and queue and not self._can_join(queue[0]):
            work = queue[0]
            self.waiting.remove(work)
            self._since.pop(work.id)
            self._setting = None
            if not work.is_session:
                return Orders(dropped=dropped, whole=work)
            self.session, self._called = work, time.monotonic()
            return Orders(dropped=dropped, setting=work.setting, begun=(work,))
        setting, begun = self._admit(queue)
        steppers = [each for each in self.standings.values() if each.shape]
        chosen = choose(steppers, max_rows=self._max_rows, now=time.time(), used=self._shares.used)
        return Orders(dropped=dropped, setting=setting, begun=begun, steps=tuple(chosen))

    def forget(self, name: str) -> None:
        """Takes a job that has ended off the list."""
        self.standings.pop(name, None)
        if self._has_session(name):
            self.session = None
            self._calls.clear()

    def unset(self) -> None:
        """Notes that the model's setting is unknown and has to be made again."""
        self._setting = None

    def charge(self, orders: Orders, seconds: float) -> None:
        """Notes how long orders took."""
        if orders.whole is not None:
            self._shares.add(orders.whole.user, seconds)
        if self.session is not None:
            self._shares.add(self.session.user, seconds)
            if orders.call is not None or orders.begun:  # a pause begins when the ranks are done
                self._called = time.monotonic()
        self._shares.charge([self.standings[name] for name in orders.steps if name in self.standings], seconds)

    def _admit(self, queue: list[JobWork]) -> tuple[_Setting | None, tuple[JobWork, ...]]:
        """Lets jobs in; returns the setting if it changes, and the jobs."""
        changed = None
        if not self.standings and queue and queue[0].setting != self._setting:
            changed = self._setting = queue[0].setting
        begun: list[JobWork] = []
        for work in queue:
            if len(self.standings) >= self._max_active:
                break
            if work.setting != self._setting or not self._can_join(work) or not self._fits(work):
                if time.monotonic() - self._since[work.id][1] > _PATIENCE:
                    break  # it has waited long enough; no later job may overtake it
                continue
            arrived, _ = self._since.pop(work.id)
            used = entry_time(list(self.standings.values()))
            needs = work.memory.working
            self.standings[work.id] = Standing(
                work.id, arrived, deadline=work.deadline, used=used, memory=needs, user=work.user
            )
            self.waiting.remove(work)
            begun.append(work)
        return changed, tuple(begun)

    def _has_session(self, name: str) -> bool:
        return self.session is not None and self.session.id == name

    def _fits(self, work: JobWork) -> bool:
        """Says whether a rank can hold a job beside those that take turns; with no other job it always begins."""
        if self._room is None or not self.standings:
            return True
        return work.memory.total + sum(each.memory for each in self.standings.values()) <= self._room
