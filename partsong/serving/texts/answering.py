"""Answers the requests that come over the wire with an opened text model, a task for each."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

from partsong.errors import PartsongError
from partsong.serving.errors import ApiError, as_api_error
from partsong.serving.texts.events import TextAccepted, TextDone, TextEvent, TextRequest, record_of
from partsong.serving.texts.wire import TextWire

__all__ = ["OpenedText", "leave_at_once", "serve_opened"]

_LOG = logging.getLogger(__name__)


class OpenedText(Protocol):
    """Answers requests with a model in this process.

    Attributes:
        kind: "text" for a diffusion language model, "thinking" for one that thinking methods call.
        strategies: what may follow the model's name.
    """

    kind: str

    @property
    def strategies(self) -> list[str]:
        """Returns what may follow the model's name."""
        ...

    def prepare(self, request: TextRequest) -> Any:
        """Checks a request before any work and returns what `run` takes."""
        ...

    async def run(self, job: Any, emit: Callable[[TextEvent], None]) -> TextDone:
        """Answers a request, and stops when its task is cancelled."""
        ...


def serve_opened(end: socket.socket, open_model: Callable[[], OpenedText]) -> bool:
    """Opens a model and answers requests until the server closes the wire.

    Args:
        end: this end of the wire.
        open_model: loads the model.

    Returns:
        Whether there was a model; where there was none the server has been sent the reason.
    """
    return asyncio.run(_serve(end, open_model))


async def _serve(end: socket.socket, open_model: Callable[[], OpenedText]) -> bool:
    wire = await TextWire.over(end)
    opening = asyncio.ensure_future(asyncio.to_thread(open_model))
    # If the server goes away while the model is loading, this process ends as well.
    first = asyncio.ensure_future(wire.receive())
    await asyncio.wait({opening, first}, return_when=asyncio.FIRST_COMPLETED)
    if not opening.done():
        leave_at_once()
    try:
        opened = opening.result()
    except Exception as error:  # noqa: BLE001 - loading a model can fail in any way, and the server must learn how
        wire.send({"failed": _refusal(error)})
        await wire.drain()
        return False
    wire.send({"ready": {"kind": opened.kind, "strategies": list(opened.strategies)}})
    await _Desk(wire, opened).work(first)
    return True


def leave_at_once() -> NoReturn:
    """Ends this process at once, even if threads of the model are in the middle of a step."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Desk:
    """Reads records from the wire, and runs a task for each request."""

    def __init__(self, wire: TextWire, opened: OpenedText) -> None:
        self._wire, self._opened = wire, opened
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def work(self, first: asyncio.Future[dict[str, Any] | None]) -> None:
        """Works until the wire closes."""
        record = await first
        while record is not None:
            self._take(record)
            record = await self._wire.receive()

    def _take(self, record: Mapping[str, Any]) -> None:
        number = record.get("number")
        match record["do"]:
            case "ping":
                self._wire.send({"pong": True})
            case "answer":
                assert isinstance(number, int)
                task = asyncio.ensure_future(self._answer(number, record["request"]))
                self._tasks[number] = task
                task.add_done_callback(lambda task: self._leave(number, task))
            case "cancel" if number in self._tasks:
                self._tasks[number].cancel()

    def _leave(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(number)
        if task.cancelled():  # possibly before it began
            self._wire.send({"number": number, "cancelled": True})

    async def _answer(self, number: int, record: Mapping[str, Any]) -> None:
        def emit(event: TextEvent) -> None:
            self._wire.send({"number": number, "event": record_of(event)})

        try:
            job = self._opened.prepare(TextRequest.from_json(record))
            emit(TextAccepted())
            emit(await self._opened.run(job, emit))
        except Exception as error:  # noqa: BLE001 - one request may fail in any way, and the others go on
            self._wire.send({"number": number, "error": _refusal(error)})


def _refusal(error: Exception) -> dict[str, Any]:
    """Returns an error as the server passes it on; unexpected errors are logged here and not shown to clients."""
    if isinstance(error, PartsongError):
        known = as_api_error(error)
    else:
        _LOG.error("a request failed", exc_info=error)
        known = ApiError(500, f"the model failed: {type(error).__name__}; the server's log says more")
    return {"status": known.status, "message": str(known), "param": known.param, "code": known.code}
