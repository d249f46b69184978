"""Holds the sessions in which clients call a denoiser themselves."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from partsong.errors import DistributedError, PartsongError
from partsong.serving.access.users import User
from partsong.serving.errors import ApiError, leaving, shortened
from partsong.serving.jobs import Job
from partsong.serving.limits import Limits
from partsong.serving.messages import (
    JOB_ENDS,
    DenoiseAnswer,
    DenoiseCall,
    FromRanks,
    JobFailed,
    JobStarted,
    JobWork,
    Pulse,
    Ready,
    Spent,
    by_rank,
)
from partsong.serving.metrics import Metrics
from partsong.serving.replicas import Replicas
from partsong.serving.services import AUTO, SERIAL, PictureService
from partsong.serving.waiting_room import WaitingRoom

__all__ = ["DenoiseSession", "DenoiseSessions"]

#: Seconds between two looks at whether ranks can be expected at all.
_LOOK = 0.5
#: Sessions that have ended of which it is remembered why.
_REMEMBERED = 256


class SessionServer(Protocol):
    """Describes what has the ranks: the server."""

    jobs: dict[str, Job]
    replicas: dict[str, Replicas]
    rooms: dict[str, WaitingRoom]
    limits: Limits
    metrics: Metrics
    leaves_at: float | None


@dataclass(kw_only=True, eq=False)
class DenoiseSession:
    """Describes a session from its request to its end.

    Attributes:
        id: its name, chosen by the server.
        model: name of its model.
        strategy: how the ranks share each call, as on a command line; ``serial`` for none.
        user: whose it is.
        exactness: ``exact``, ``bounded`` or ``approximate``.
        denoiser: what the ranks said of their denoiser.
        calls: how many were made.
        spent: by rank, over all calls.
        seconds: that the ranks took for them.
        has_ended: whether it is over.
        begun: is done once it has the ranks, or will not get them.
        answer: to the call that is running; None between calls.
    """

    id: str
    model: str
    strategy: str
    user: str
    exactness: str
    denoiser: Mapping[str, Any]
    calls: int = 0
    spent: tuple[Spent, ...] = ()
    seconds: float = 0.0
    has_ended: bool = False
    begun: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    answer: asyncio.Future[DenoiseAnswer] | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the session as clients see it."""
        return {
            "id": self.id,
            "object": "denoise.session",
            "model": self.model,
            "strategy": self.strategy,
            "class": self.exactness,
            "denoiser": dict(self.denoiser),
            "calls": self.calls,
            "seconds": round(self.seconds, 6),
            "ranks": by_rank(self.spent),
        }


class DenoiseSessions:
    """Opens sessions on ranks that live, passes their calls on, and closes them.

    A session has the ranks of a replica to itself, as a job does whose strategies keep something between steps. It
    waits for its turn among the jobs, and ends when its client closes it or makes no call for a while.

    Args:
        server: what has the ranks.
    """

    def __init__(self, server: SessionServer) -> None:
        self._server = server
        self._open: dict[str, DenoiseSession] = {}
        self._reasons: dict[str, str] = {}  # why the latest ones have ended, the oldest first

    def __iter__(self) -> Iterator[DenoiseSession]:
        return iter(self._open.values())

    def find(self, name: str, user: User) -> DenoiseSession:
        """Returns a session by name.

        Raises:
            ApiError: there is none, or it is another user's; says why it has ended, where that is known.
        """
        session = self._open.get(name)
        if session is None or not user.sees(session.user):
            raise _gone(name, self._reasons.get(name, "it has ended, or never was"))
        return session

    async def open(
        self, model: PictureService, strategy: str | None, lora: str | None, user: User, *, pause: float = 30.0
    ) -> DenoiseSession:
        """Opens a session and waits until it has the ranks.

        Args:
            model: whose denoiser is called.
            strategy: as on a command line; None and ``auto`` take those of the model's own that fit.
            lora: an adapter by name.
            user: who asks.
            pause: seconds without a call after which it ends.

        Raises:
            ApiError: too much waits already, or the ranks are not there.
            PartsongError: the ranks refuse it.
        """
        if self._server.leaves_at is not None:
            raise leaving()
        room, replicas = self._server.rooms[model.name], self._server.replicas[model.name]
        facts = await room.facts()
        names, _ = model.strategies(strategy)
        if strategy in (None, AUTO):  # what the planner chose for whole pictures may have parts beside the denoiser
            names = tuple(name for name in names if name.partition(":")[0] in facts.session_strategies)
        work = JobWork(
            id=f"denoise_{secrets.token_hex(12)}",
            prompt="",
            arguments={},
            strategies=names,
            lora=lora,
            out=(),
            user=user.name,
            pause=pause,
        )
        exactness = await self._check(work, model, user)
        named = {"strategy": "+".join(names) or SERIAL, "exactness": exactness, "denoiser": facts.denoiser}
        session = self._open[work.id] = DenoiseSession(id=work.id, model=model.name, user=user.name, **named)
        replicas.submit(work)
        try:
            await _begun(session, room)
        except BaseException:  # also where the client hangs up
            self._end(session, "its client did not wait for it")
            replicas.cancel(session.id)
            raise
        return session

    async def call(self, session: DenoiseSession, body: bytes) -> DenoiseAnswer:
        """Makes one call and returns its answer.

        Raises:
            ApiError: the last call is still running, or the session has ended.
            PartsongError: the ranks refuse the call, which leaves the session as it was, or fail at it, which ends it.
        """
        if session.answer is not None:
            raise ApiError(409, "a call of this session is running; send the next one after its answer", code="busy")
        session.calls += 1
        answer = session.answer = asyncio.get_running_loop().create_future()
        try:
            message = DenoiseCall(id=session.id, number=session.calls, body=body)
            if not self._server.replicas[session.model].call(message):
                self._end(session, "its ranks have ended")
                raise DistributedError(f"the ranks of {session.model} have ended, and this session with them")
            answered = await answer
        finally:
            session.answer = None
        if answered.error is not None:
            raise answered.error
        self._count(session, answered)
        return answered

    def close(self, session: DenoiseSession) -> None:
        """Ends a session; its ranks go on with what waits."""
        self._end(session, "its client has closed it")
        self._server.replicas[session.model].cancel(session.id)

    def end_all(self) -> None:
        """Ends all sessions, since the server ends."""
        for session in list(self._open.values()):
            self._end(session, "the server ends", leaving())

    def take(self, message: FromRanks) -> bool:
        """Notes what ranks say; returns whether it is about a session."""
        if isinstance(message, Ready | Pulse) or not message.id.startswith("denoise_"):
            return False
        session = self._open.get(message.id)
        if session is None:
            return True
        if isinstance(message, JobStarted) and not session.begun.done():
            session.begun.set_result(None)
        elif isinstance(message, DenoiseAnswer) and session.answer is not None and message.number == session.calls:
            session.answer.set_result(message)
        elif isinstance(message, JOB_ENDS):
            error = message.error if isinstance(message, JobFailed) else None
            self._end(session, "no call came for a while" if error is None else f"a call failed: {error}", error)
        return True

    def lost(self, begun: Mapping[str, JobWork], error: PartsongError) -> dict[str, JobWork]:
        """Ends the sessions whose ranks have died, since what they kept is gone; returns what else they had begun."""
        for name in begun:
            if name in self._open:
                self._end(self._open[name], f"its ranks have ended: {error}", error)
        return {name: work for name, work in begun.items() if not work.is_session}

    async def _check(self, work: JobWork, model: PictureService, user: User) -> str:
        """Returns the class of a session's strategies, where it can be opened."""
        self._check_room(model, user)
        checked = await self._server.rooms[model.name].check(work)
        if checked.error is not None:
            raise checked.error
        self._check_room(model, user)  # others have come meanwhile
        return checked.kind

    def _check_room(self, model: PictureService, user: User) -> None:
        waiting = sum(each.model == model.name and not each.begun.done() for each in self._open.values())
        self._server.limits.check_queue(self._server.jobs.values(), model.name, more=waiting)
        user.check_jobs(chain(self._server.jobs.values(), self._open.values()))

    def _count(self, session: DenoiseSession, answered: DenoiseAnswer) -> None:
        before = session.spent or (Spent(),) * len(answered.spent)
        session.spent = tuple(
            Spent(one.bytes_sent + more.bytes_sent, one.seconds_waiting + more.seconds_waiting)
            for one, more in zip(before, answered.spent, strict=True)
        )
        session.seconds += answered.seconds
        self._server.metrics.note_call(session.model, session.strategy, answered)

    def _end(self, session: DenoiseSession, reason: str, error: PartsongError | None = None) -> None:
        """Ends a session, and whatever waits for it with an error."""
        session.has_ended = True
        self._open.pop(session.id, None)
        self._reasons[session.id] = reason
        if len(self._reasons) > _REMEMBERED:
            self._reasons.pop(next(iter(self._reasons)))
        failure = error or _gone(session.id, reason)
        for future in (session.begun, session.answer):
            if future is not None and not future.done():
                future.set_exception(failure)
                future.exception()  # nobody may be waiting any more


def _gone(name: str, reason: str) -> ApiError:
    return ApiError(404, f"there is no session {shortened(name)}: {reason}", code="not_found", is_final=True)


async def _begun(session: DenoiseSession, room: WaitingRoom) -> None:
    """Waits until a session has the ranks.

    Raises:
        ApiError: ranks cannot be expected.
    """
    while not session.begun.done():
        await asyncio.wait({session.begun}, timeout=_LOOK)
        if not session.begun.done() and room.hindrance is not None:
            raise room.hindrance
    session.begun.result()
