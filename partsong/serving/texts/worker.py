"""Runs in the process of a served text model: loads it, and answers the requests that come over the wire.

The process ends when its end of the wire says that the server is gone, however that happened.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

from partsong.errors import ArgumentError, PartsongError
from partsong.serving.errors import ApiError, as_api_error
from partsong.serving.texts.events import TextAccepted, TextDone, TextEvent, TextRequest, record_of
from partsong.serving.texts.wire import TextSpec, TextWire

__all__ = ["OpenedText", "serve_text"]

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


def serve_text(spec: TextSpec, end: socket.socket) -> None:
    """Serves a model until the server closes the wire; the target of the process."""
    # Ctrl-C reaches every process of a terminal, but the server is the one to end this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve(spec, end))


async def _serve(spec: TextSpec, end: socket.socket) -> None:
    wire = await TextWire.over(end)
    opening = asyncio.ensure_future(asyncio.to_thread(_open, spec))
    # If the server goes away while the model is loading, this process ends as well.
    first = asyncio.ensure_future(wire.receive())
    await asyncio.wait({opening, first}, return_when=asyncio.FIRST_COMPLETED)
    if not opening.done():
        _leave_at_once()
    try:
        opened = opening.result()
    except Exception as error:  # noqa: BLE001 - loading a model can fail in any way, and the server must learn how
        wire.send({"failed": _refusal(error)})
        await wire.drain()
        return
    wire.send({"ready": {"kind": opened.kind, "strategies": list(opened.strategies)}})
    await _Desk(wire, opened).work(first)
    _leave_at_once()


def _leave_at_once() -> NoReturn:
    """Ends this process at once, even if threads of the model are in the middle of a step."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _open(spec: TextSpec) -> OpenedText:
    """Loads the model by its kind: one that writes token after token, or one that decides tokens in any order."""
    import torch
    from transformers.utils import logging as transformers_logging

    from partsong import zoo

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    is_zoo = spec.model in zoo.MODELS
    if spec.threads or is_zoo:
        torch.set_num_threads(spec.threads or 1)
    if _is_causal(spec):
        from partsong.serving.texts.local_thinking import ThinkingTexts

        how: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device, "speculate": spec.speculate}
        if spec.nproc > 1:
            how |= {"nproc": spec.nproc, "share": spec.share, "threads": spec.threads}
        return ThinkingTexts(spec.model, spec.limits, spec.verifier, weights=spec.weights, **how)
    if spec.nproc > 1:
        raise ArgumentError(
            f"{spec.model} decides tokens in any order, which is served on one rank; leave --text-nproc out"
        )
    from partsong.jobs.folder_source import find_text_model
    from partsong.serving.texts.diffusion import DiffusionTexts

    source = find_text_model(spec.model, spec.adapter)
    return DiffusionTexts(source, spec)


def _is_causal(spec: TextSpec) -> bool:
    """Returns whether a model writes one token after another."""
    from partsong.errors import UnsupportedError
    from partsong.model_folders import model_folder, read_settings
    from partsong.reasoning.local import smollm2
    from partsong.zoo import task_of

    if task_of(spec.model) is not None:
        return True  # imported here: a model that thinks does not need it
    from partsong.samplers.text.families import adapter_of

    settings = read_settings(model_folder(spec.model, others={smollm2.NAME: smollm2.folder}))
    try:
        return adapter_of(settings, spec.adapter).noise == "none"
    except UnsupportedError:
        if settings.get("mask_token_id") is not None:
            raise
        return True  # the engine knows more causal families, and refuses any other


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
