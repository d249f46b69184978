"""Listens for HTTP, and closes connections that do not say what they want."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from partsong.serving.app import build_app
from partsong.serving.server import Server

__all__ = ["run_server"]

#: Seconds in which a connection has to ask for something, and connections at a time.
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
    listener.listen(_MOST)  # whoever calls before the server is up waits for it
    address = listener.getsockname()
    names = ", ".join([*(model.name for model in server.models), *server.texts]) or "another server's models"
    sys.stderr.write(f"partsong serves {names} at http://{address[0]}:{address[1]}; /ready says when all are there\n")
    sys.stderr.flush()
    uvicorn.Server(config).run(sockets=[listener])
