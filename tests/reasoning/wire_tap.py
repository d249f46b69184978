"""A plain TCP relay that keeps what a server says, to check against what is made of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit


class WireTap:
    """Stands between an engine and a server, for the time of an ``async with`` block.

    Attributes:
        base_url: to give to the engine.
        received: all that came from the server, one list of pieces by connection.
    """

    def __init__(self, base_url: str) -> None:
        self._to = urlsplit(base_url)
        self.received: list[bytearray] = []

    async def __aenter__(self) -> WireTap:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}{self._to.path}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._to.hostname, self._to.port)
        kept = bytearray()
        self.received.append(kept)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(_copy(reader, up_writer), _copy(up_reader, writer, kept))

    def usages(self) -> Iterator[dict[str, Any]]:
        """Yields every count of tokens that the server sent, anywhere in its answers."""
        text = b"\n".join(self.received).decode("utf-8", "replace")
        place = text.find('"usage":{')
        while place >= 0:
            usage, _ = json.JSONDecoder().raw_decode(text, place + len('"usage":'))
            yield usage
            place = text.find('"usage":{', place + 1)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None = None) -> None:
    try:
        while piece := await reader.read(65536):
            if kept is not None:
                kept += piece
            writer.write(piece)
            await writer.drain()
    finally:
        writer.close()
