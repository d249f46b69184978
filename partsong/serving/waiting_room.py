"""Lets requests for pictures and videos wait for the ranks of their model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from partsong.errors import DistributedError
from partsong.serving.arrivals import Arrivals
from partsong.serving.errors import ApiError, leaving
from partsong.serving.limits import Limits
from partsong.serving.messages import Checked, JobWork, Ready
from partsong.serving.replicas import Replicas

__all__ = ["WaitingRoom"]

#: Seconds until ranks that have just ended are asked again; whether others are up is known by then.
_PAUSE = 0.1


class WaitingRoom:
    """Holds the requests that wait for the ranks of one model.

    Args:
        replicas: of the model.
        limits: say how many may wait, and for how long.
        server_ends: says whether the server takes no further jobs.
    """

    def __init__(self, replicas: Replicas, limits: Limits, server_ends: Callable[[], bool]) -> None:
        self._replicas, self._limits, self._server_ends = replicas, limits, server_ends
        self._arrivals = Arrivals()

    def note(self) -> None:
        """Lets requests look again: the ranks are there, or cannot be started, or the server ends."""
        self._arrivals.note()

    @property
    def hindrance(self) -> ApiError | None:
        """Returns why nobody should wait here; None where ranks are up, or are starting."""
        if self._server_ends():
            return leaving()
        trouble = self._replicas.trouble
        if trouble is None:
            return None
        message = f"{self._replicas.name} cannot be served now: {trouble}"
        return ApiError(503, message, code="model_unavailable", retry_after=trouble.seconds_left)

    async def facts(self, until: float | None = None) -> Ready:
        """Waits for ranks; returns what they say of their model.

        Args:
            until: the latest time, by `time.monotonic`; None takes the limit.

        Raises:
            ApiError: they do not come, or too many requests wait for them.
        """
        name, most = self._replicas.name, self._limits.waiting
        if self._arrivals.num >= most:
            message = f"{most} requests wait for the ranks of {name} already; try again later"
            raise ApiError(429, message, code="queue_full", retry_after=5.0)
        seconds = self._limits.start_seconds if until is None else max(0.0, until - time.monotonic())
        try:
            return await self._arrivals.wait(self._find, seconds)
        except TimeoutError:
            raise self._too_late() from None

    async def check(self, work: JobWork) -> Checked:
        """Asks ranks whether a job could be carried out; asks others where these have ended meanwhile.

        Raises:
            ApiError: see `facts`.
        """
        until = time.monotonic() + self._limits.start_seconds
        while time.monotonic() < until:
            await self.facts(until)
            try:
                return await self._replicas.check(work)
            except DistributedError:
                await asyncio.sleep(_PAUSE)
        raise self._too_late()

    def _find(self) -> Ready | None:
        if (hindrance := self.hindrance) is not None:
            raise hindrance
        return self._replicas.facts if self._replicas.is_up else None

    def _too_late(self) -> ApiError:
        message = (
            f"the ranks of {self._replicas.name} are starting, and did not answer within "
            f"{self._limits.start_seconds:g} s; ask again later (/ready says when they are there)"
        )
        return ApiError(503, message, code="model_unavailable", retry_after=5.0)
