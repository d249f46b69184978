"""Starts the process of a text model, passes it requests, and says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from partsong.errors import ArgumentError, PartsongError
from partsong.serving.errors import ApiError
from partsong.serving.texts.events import TextDone, TextEvent, TextRequest, event_of
from partsong.serving.texts.wire import TextSpec, TextWire
from partsong.serving.texts.worker import serve_text

__all__ = ["TextProcess"]

#: Seconds that a process gets to end by itself.
_GRACE = 5.0


class TextProcess:
    """Holds one run of the process of a text model.

    Args:
        spec: what it serves.
        outcomes: counts how requests end: "done", "failed" and "cancelled".

    Attributes:
        about: what it says of its model: ``kind`` and ``strategies``; empty before it is ready.
        heard: when it last sent something, by `time.monotonic`.
        alive: whether requests can be sent to it.
        how: how it ended, in words; "" while it runs.
    """

    def __init__(self, spec: TextSpec, outcomes: Counter[str]) -> None:
        self.spec, self.about, self.how = spec, dict[str, Any](), ""
        self.heard, self.alive = 0.0, False
        self.outcomes = outcomes
        self._requests: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._ended = asyncio.Event()
        self._wire: TextWire | None = None

    @property
    def in_flight(self) -> int:
        """Counts the unfinished requests of the process, those that are being cancelled included."""
        return len(self._requests)

    @property
    def pid(self) -> int | None:
        """Returns the process id; None before there is a process and after it."""
        return None if self._wire is None or self.how else self._process.pid

    async def start(self) -> None:
        """Starts the process and waits until the model is loaded.

        Raises:
            ArgumentError: the model cannot be loaded.
            ApiError: the process ended before it was ready.
        """
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        name = f"text {self.spec.name}"
        # Daemons may start no ranks. Either way the process ends with the server, when its end of the wire closes.
        daemon = self.spec.nproc == 1
        self._process = context.Process(target=serve_text, args=(self.spec, theirs), name=name, daemon=daemon)
        await asyncio.to_thread(self._process.start)
        theirs.close()
        self._first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._wire = wire = await TextWire.over(ours)
        self._reading = asyncio.ensure_future(self._read(wire))
        try:
            record = await self._first
        except asyncio.CancelledError:
            await self.end()
            raise
        if "ready" not in record:
            await self.end()
            raise _start_error(self.spec, record)
        self.about, self.alive = record["ready"], True

    async def answer(self, number: int, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Yields what happens while a request is answered, `TextDone` last; closing the generator cancels it.

        Args:
            number: one that no other request has.
            request: what to answer.

        Raises:
            ApiError: there is no answer.
        """
        records = self._requests[number] = asyncio.Queue()
        self._send({"do": "answer", "number": number, "request": request.as_json()})
        if self.how:
            self._fail_all()
        ended = False
        try:
            while not ended:
                record = await records.get()
                if "event" not in record:
                    ended = True
                    raise _error(record)
                event = event_of(record["event"])
                ended = isinstance(event, TextDone)
                yield event
        finally:
            if not ended:
                self._send({"do": "cancel", "number": number})

    def ping(self) -> None:
        """Asks for a sign of life, which `heard` will show."""
        self._send({"do": "ping"})

    async def wait(self) -> None:
        """Waits until the process has ended."""
        await self._ended.wait()

    async def end(self) -> None:
        """Ends the process; its requests get an error. A process that was never started counts as ended."""
        if self._wire is None:
            return
        self._wire.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _GRACE)
        if not self._ended.is_set():
            self._process.kill()
            await self._ended.wait()

    async def _read(self, wire: TextWire) -> None:
        """Distributes what comes over the wire until it closes, when the process ends."""
        while (record := await wire.receive()) is not None:
            self.heard = time.monotonic()
            if not self._first.done():
                self._first.set_result(record)
            elif record.get("number") in self._requests:
                self._hand_out(record["number"], record)
        self.alive = False
        wire.close()
        await asyncio.to_thread(self._process.join, _GRACE)
        if self._process.exitcode is None:
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        code = self._process.exitcode or 0
        self.how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self._process.close()
        self._fail_all()
        self._ended.set()

    def _send(self, record: dict[str, Any]) -> None:
        assert self._wire is not None, "the process has not been started"
        self._wire.send(record)

    def _hand_out(self, number: int, record: dict[str, Any]) -> None:
        records = self._requests[number]
        records.put_nowait(record)
        event = record.get("event")
        if event is None or event["kind"] == TextDone.__name__:
            self.outcomes["done" if event else "cancelled" if "cancelled" in record else "failed"] += 1
            del self._requests[number]

    def _fail_all(self) -> None:
        ended = {"ended": f"the process of model {self.spec.name} {self.how}"}
        if not self._first.done():
            self._first.set_result(ended)
        for records in self._requests.values():
            records.put_nowait(ended)
        self.outcomes["failed"] += len(self._requests)
        self._requests.clear()


def _error(record: Mapping[str, Any]) -> ApiError:
    if "error" in record:
        error = record["error"]
        return ApiError(error["status"], error["message"], param=error["param"], code=error["code"])
    if "ended" in record:
        message = f"{record['ended']} while it answered this request; it is started anew, so ask again"
        return ApiError(500, message, code="model_process_ended")
    return ApiError(499, "the request was cancelled", code="cancelled")


def _start_error(spec: TextSpec, record: Mapping[str, Any]) -> PartsongError:
    if "failed" not in record:
        return ApiError(503, f"{record['ended']} while it loaded {spec.model}", code="model_not_loaded")
    refused = record["failed"]
    message = f"model {spec.name}: {refused['message']}"
    return ArgumentError(message) if refused["status"] == 400 else ApiError(503, message, code="model_not_loaded")
