"""Listens for HTTP, and closes connections that send no request."""

from __future__ import annotations

import asyncio
import sys
import threading
from queue import SimpleQueue
from socket import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from partsong.errors import OutputError
from partsong.serving.app import build_app
from partsong.serving.ranks.settings import ReplicaSettings
from partsong.serving.runners import RankRunner
from partsong.serving.server import Server

__all__ = ["run_beside_rank", "run_server"]

#: Seconds in which a connection has to send a request, and most connections at a time.
_HEAD_SECONDS, _MOST = 20.0, 2048


class _ImpatientProtocol(H11Protocol):
    """Closes a connection whose first request has not begun in time."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        asyncio.get_running_loop().call_later(_HEAD_SECONDS, self._look)

    def _look(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


def run_server(server: Server, *, host: str, port: int) -> None:
    """Serves until the process is interrupted or asked to end.

    Args:
        server: what to serve.
        host: address to listen on.
        port: port to listen on; 0 takes a free one, which a line on standard error names.

    Raises:
        OutputError: the server's folder is another server's, or cannot be written.
    """
    web, listener = _listening(server, host, port)
    web.run(sockets=[listener])


def run_beside_rank(server: Server, *, host: str, port: int) -> None:
    """Serves from a thread of the first rank of a program started by torchrun, while the program acts as a rank.

    Args:
        server: what to serve; one model of pictures or videos; all processes of the program are its ranks.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.

    Raises:
        PartsongError: the ranks ended unasked; torchrun then ends the others, and restarts all of
            them if it is configured to.
    """
    given: SimpleQueue[ReplicaSettings | None] = SimpleQueue()
    ended = threading.Event()

    def hand_over(settings: ReplicaSettings, nproc: int, closing: threading.Event) -> None:
        given.put(settings)
        ended.wait()

    server.runner = RankRunner(run=hand_over)
    web, listener = _listening(server, host, port)

    def run_web() -> None:
        try:
            web.run(sockets=[listener])
        finally:
            given.put(None)

    thread = threading.Thread(target=run_web, name="web server")
    thread.start()
    try:
        from partsong.serving.ranks.loop import serve_ranks

        if (settings := given.get()) is None:
            raise OutputError("the web server did not start; the lines above say why")
        serve_ranks(settings)
    finally:
        ended.set()
        web.should_exit = True
        thread.join()


def _listening(server: Server, host: str, port: int) -> tuple[uvicorn.Server, socket]:
    server.open()
    config = uvicorn.Config(
        build_app(server),
        host=host,
        port=port,
        http=_ImpatientProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=_MOST,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=3,
    )
    listener = config.bind_socket()
    listener.listen(_MOST)  # requests before the server is up wait for it
    address = listener.getsockname()
    names = ", ".join([*(model.name for model in server.models), *server.texts]) or "another server's models"
    sys.stderr.write(f"partsong serves {names} at http://{address[0]}:{address[1]}; /ready says when all are there\n")
    sys.stderr.flush()
    return uvicorn.Server(config), listener
