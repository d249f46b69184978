"""Carries JSON lines between a server and the process of a text model, over a private pair of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.reasoning.scorers.verifier import VerifierAddress
from partsong.serving.texts.limits import TextLimits

__all__ = ["TextSpec", "TextWire"]

#: Longest line, in bytes.
_MAX_LINE = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSpec:
    """Names a model that a process of its own serves.

    Attributes:
        name: what clients call it.
        model: a zoo name, a folder or a hub id.
        adapter: its family, as in `decode`, where the model's settings do not say.
        dtype: name of a torch type; None leaves the choice to the model.
        device: None is the first GPU, or the CPU if there is none.
        threads: None is 1 for a zoo model and torch's own choice otherwise.
        speculate: who guesses tokens ahead, as in `LocalEngine`; for causal models.
        nproc: how many ranks share the model, by `TensorParallel` if `share` names nothing else.
        share: how they share it, as text such as "sharded-weights".
        weights: "int8" or "int4" rounds weights, as in `LocalEngine`; for causal models.
        limits: what requests may ask for.
        verifier: scores texts for methods that take a scorer; None leaves them their own.
    """

    name: str
    model: str
    adapter: str | None = None
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    speculate: tuple[str, ...] = ()
    nproc: int = 1
    share: str | None = None
    weights: str | None = None
    limits: TextLimits = field(default_factory=TextLimits)
    verifier: VerifierAddress | None = None


class TextWire:
    """Sends and receives records, a line of JSON each."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, end: socket.socket) -> TextWire:
        """Opens a wire over one end of a pair of sockets."""
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end, limit=_MAX_LINE))

    def send(self, record: Mapping[str, Any]) -> None:
        """Sends a record; what can no longer be sent is dropped, and `receive` then says that the other end is gone.

        A text may hold half of a surrogate pair, which UTF-8 cannot carry, so all but ASCII characters are escaped.
        """
        if not self._writer.is_closing():
            self._writer.write(json.dumps(record).encode() + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """Returns the next record; None when the other end is gone."""
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    async def drain(self) -> None:
        """Waits until everything sent has left, as long as the other end still reads."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    def close(self) -> None:
        """Closes this end."""
        self._writer.close()
