"""Serves a text model from a process of its own, which is started anew when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

from partsong.errors import PartsongError
from partsong.serving.arrivals import Arrivals
from partsong.serving.errors import ApiError
from partsong.serving.texts.events import TextEvent, TextRequest
from partsong.serving.texts.process import TextProcess
from partsong.serving.texts.wire import TextSpec

__all__ = ["LocalText"]

_LOG = logging.getLogger(__name__)
#: Seconds between two requests for a sign of life, and how old the last one may be.
_PULSE, _SILENCE = 2.0, 10.0
#: Seconds of the first and of the longest pause after a failed start.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


class LocalText:
    """Answers requests in a process of its own; see `ServedText`.

    Args:
        spec: what to serve.

    Attributes:
        name: what clients call the model.
        limits: what requests may ask for.
        starts: how often the process has been started.
        broken: why the model cannot be served at all; "" where it can.
        outcomes: how many requests were "done", "failed" and "cancelled".
    """

    def __init__(self, spec: TextSpec) -> None:
        spec.limits.validate()
        self.spec, self.name, self.limits, self.starts = spec, spec.name, spec.limits, 0
        self.outcomes: Counter[str] = Counter()
        self._numbers, self._arrivals = itertools.count(), Arrivals()
        self._process: TextProcess | None = None
        self.broken = ""
        self._about: dict[str, Any] = {}
        self._keeper: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Returns whether the process has given a sign of life lately."""
        if self._process is None or not self._process.alive:
            return False
        return time.monotonic() - self._process.heard < _SILENCE

    @property
    def in_flight(self) -> int:
        """Counts the running requests, those that wait for the process included."""
        return self._arrivals.num + (0 if self._process is None else self._process.in_flight)

    @property
    def pid(self) -> int | None:
        """Returns the id of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process and waits until the model is loaded.

        Raises:
            ArgumentError: the model cannot be loaded.
            ApiError: the process ended before it was ready.
        """
        try:
            await self._begin()
        except PartsongError as error:
            self.broken = str(error)
            self._arrivals.note()
            raise
        self._keeper = asyncio.ensure_future(self._keep())

    async def close(self) -> None:
        """Ends the process; running requests get an error."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._process is not None:
            await self._process.end()

    async def run(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Yields what happens while a request is answered; see `ServedText.run`."""
        if self.in_flight >= self.limits.max_in_flight:
            raise ApiError(
                429,
                f"model {self.name} has {self.in_flight} requests under way, the most it takes; try again soon",
                code="too_many_requests",
                retry_after=1.0,
            )
        process = await self._wait_for_process()
        async with contextlib.aclosing(process.answer(next(self._numbers), request)) as events:
            async for event in events:
                yield event

    def as_json(self) -> dict[str, Any]:
        """Returns the model by the keys of ``GET /v1/models``: id, kind, strategies and defaults."""
        return {"id": self.name, "kind": "text", "strategies": [], **self._about, "defaults": {}}

    async def _wait_for_process(self) -> TextProcess:
        try:
            return await self._arrivals.wait(self._running_process, self.limits.start_seconds)
        except TimeoutError:
            message = f"model {self.name} is being started again and is not ready yet; try again later"
            raise ApiError(503, message, code="model_not_ready", retry_after=5.0) from None

    def _running_process(self) -> TextProcess | None:
        if self.broken:
            raise ApiError(503, self.broken, code="model_not_loaded")
        return self._process if self._process is not None and self._process.alive else None

    async def _begin(self) -> None:
        self.starts += 1
        process = self._process = TextProcess(self.spec, self.outcomes)
        await process.start()
        self._about = process.about
        self._arrivals.note()

    async def _keep(self) -> None:
        """Asks the process for signs of life, and starts another one when it has died."""
        pause = 0.0
        while True:
            assert self._process is not None
            if not pause:
                await self._watch(self._process)
                _LOG.warning("the process of model %s %s; starting another", self.name, self._process.how)
            try:
                await self._begin()
                pause = 0.0
            except PartsongError as error:
                pause = min(max(2 * pause, _FIRST_PAUSE), _LONGEST_PAUSE)
                _LOG.error("model %s cannot be started: %s; next attempt in %g s", self.name, error, pause)
                await asyncio.sleep(pause)

    async def _watch(self, process: TextProcess) -> None:
        """Waits until a process has ended, and asks it for signs of life meanwhile."""
        while not process.how:
            process.ping()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _PULSE)
