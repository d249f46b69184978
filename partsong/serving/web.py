"""Listens for HTTP, closes connections that send no request, and notices clients that have hung up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue
from socket import IPPROTO_TCP, TCP_NODELAY, socket
from types import FrameType
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from partsong.errors import OutputError
from partsong.serving.access.gate import ACCESS
from partsong.serving.app import build_app
from partsong.serving.ranks.settings import ReplicaSettings
from partsong.serving.runners import RankRunner
from partsong.serving.server import Server

__all__ = ["WebSettings", "run_beside_rank", "run_server"]

#: Seconds in which a connection has to send a request, and most connections at a time.
_HEAD_SECONDS, _MOST = 20.0, 2048
#: Seconds between interim replies to a client that has ended its side: the second fails if it is gone.
_PROBES = (0.2, 1.0, 5.0)
#: Files that a server opens beside its connections: the journal, outputs, lines to ranks, libraries.
_OTHER_FILES = 256


class _ImpatientProtocol(H11Protocol):
    """Closes a connection that has begun no request, or not the whole head of one, in time.

    When there is no room for another connection, the one that has been idle longest is closed for it: so a probe of the
    server's health gets its answer while others hold connections open.
    """

    most = _MOST
    idle: ClassVar[dict[_ImpatientProtocol, None]] = {}
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self.most and self.idle:
            next(iter(self.idle)).transport.abort()
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keeps a connection whose client has said that it sends no more, and still waits for its answer.

        A client that has hung up looks the same until something is sent to it. What can be sent before the answer is an
        interim reply, which clients skip; those of HTTP/1.0 do not know it.
        """
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_started or self.conn.their_http_version != b"1.1":
            return None
        cycle.keep_alive = False
        self._probe(_PROBES)
        return True

    def _probe(self, pauses: tuple[float, ...]) -> None:
        if self.cycle is None or self.cycle.response_started or self.transport.is_closing():
            return
        interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
        self.transport.write(self.conn.send(interim))
        if pauses:
            asyncio.get_running_loop().call_later(pauses[0], self._probe, pauses[1:])

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Begins to count the seconds of a connection that is idle or in the middle of a head."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
            self._rest()
        elif self._patience is None:
            self.idle[self] = None
            self._patience = asyncio.get_running_loop().call_later(_HEAD_SECONDS, self.transport.close)

    def _rest(self) -> None:
        self.idle.pop(self, None)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class _Web(uvicorn.Server):
    """Tells the server when it is asked to end.

    Args:
        config: of uvicorn.
        server: is given the rest of the time to finish its jobs.
        grace: seconds for that.
    """

    def __init__(self, config: uvicorn.Config, server: Server, grace: float) -> None:
        super().__init__(config)
        self._jobs, self._grace = server, grace

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Also restarts the ranks on SIGHUP, where signals can be heard."""
        await super().startup(sockets)
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._jobs.restart)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._jobs.leave(0.0 if self.should_exit else self._grace)
        super().handle_exit(sig, frame)


class _Lines(logging.Formatter):
    """Writes a record as one line of text, or of JSON."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
        failure = self.formatException(record.exc_info) if record.exc_info else None
        if not self._as_json:
            return f"{at} {record.levelname.lower()} {record.getMessage()}" + (f"\n{failure}" if failure else "")
        facts = getattr(record, "facts", None) or {"message": record.getMessage()}
        facts = facts | ({"traceback": failure} if failure else {})
        return json.dumps({"at": at, "level": record.levelname.lower(), "logger": record.name, **facts})


def _log_to_stderr(as_json: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(as_json))
    for name, level in (("partsong", logging.WARNING), (ACCESS.name, logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if name != ACCESS.name:
            logger.handlers, logger.propagate = [handler], False


def _raise_file_limit(most: int) -> int:
    """Lets the process open files for so many connections; returns how many there is room for."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == resource.RLIM_INFINITY else max(16, min(most, soft - _OTHER_FILES))


@dataclass(frozen=True, kw_only=True, slots=True)
class WebSettings:
    """Says where and how a server listens.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one, which a line on standard error names.
        grace: seconds in which jobs that run may finish when the server is asked to end.
        root_path: path under which a proxy shows the server.
        logs_json: whether lines of the log are JSON.
    """

    host: str
    port: int
    grace: float = 30.0
    root_path: str = ""
    logs_json: bool = False


def run_server(server: Server, settings: WebSettings) -> None:
    """Serves until the process is interrupted or asked to end.

    Args:
        server: what to serve.
        settings: where and how it listens.

    Raises:
        OutputError: the server's folder is another server's, or cannot be written.
    """
    _set_up_process(settings)
    web, listener = _listening(server, settings)
    # What has been loaded stays. Looking through all of it for garbage would stop the event loop each time.
    gc.collect()
    gc.freeze()
    # uvicorn raises the signal that ended it once more when all is done; this end was asked for.
    signal.signal(signal.SIGTERM, lambda *_: None)
    web.run(sockets=[listener])


def run_beside_rank(server: Server, settings: WebSettings) -> None:
    """Serves from a thread of the first rank of a program started by torchrun, while the program acts as a rank.

    Args:
        server: what to serve; one model of pictures or videos; all processes of the program are its ranks.
        settings: where and how it listens.

    Raises:
        PartsongError: the ranks ended unasked; torchrun then ends the others, and restarts all of
            them if it is configured to.
    """
    given: SimpleQueue[ReplicaSettings | None] = SimpleQueue()
    ended = threading.Event()

    def hand_over(of_ranks: ReplicaSettings, nproc: int, closing: threading.Event) -> None:
        given.put(of_ranks)
        ended.wait()

    server.runner = RankRunner(run=hand_over, starts_again=False)
    _set_up_process(settings)
    web, listener = _listening(server, settings)

    def run_web() -> None:
        try:
            web.run(sockets=[listener])
        finally:
            given.put(None)

    thread = threading.Thread(target=run_web, name="web server")
    thread.start()
    try:
        from partsong.serving.ranks.loop import serve_ranks

        if (of_ranks := given.get()) is None:
            raise OutputError("the web server did not start; the lines above say why")
        serve_ranks(of_ranks)
    finally:
        ended.set()
        web.should_exit = True
        thread.join()


def _set_up_process(settings: WebSettings) -> None:
    os.umask(0o077)  # prompts and pictures are their user's
    _log_to_stderr(settings.logs_json)


def _listening(server: Server, settings: WebSettings) -> tuple[_Web, socket]:
    server.open()
    _ImpatientProtocol.most = _raise_file_limit(_MOST)
    config = uvicorn.Config(
        build_app(server),
        host=settings.host,
        port=settings.port,
        root_path=settings.root_path,
        http=_ImpatientProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=3 + math.ceil(settings.grace),
    )
    listener = config.bind_socket()
    # asyncio sets this only where the socket names its protocol. Without it the body of an answer waits for the client
    # to acknowledge the head, which takes 40 ms. Connections take it over from here.
    listener.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
    listener.listen(_MOST)  # requests before the server is up wait for it
    address = listener.getsockname()
    names = ", ".join([*(model.name for model in server.models), *server.texts]) or "another server's models"
    sys.stderr.write(f"partsong serves {names} at http://{address[0]}:{address[1]}; /ready says when all are there\n")
    sys.stderr.flush()
    return _Web(config, server, settings.grace), listener
