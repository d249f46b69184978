"""An HTTP server on loopback that speaks the OpenAI API, and misbehaves as a test asks it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from partsong.reasoning.remote import OpenAIEngine, Patience

#: Quick where nothing is waited for.
HASTY = Patience(first=5.0, stall=5.0, total=20.0, retries=3, backoff=0.002, longest=0.01)


@dataclass
class Exchange:
    """One request as it came in, and the way back.

    Attributes:
        body: of the request, read as JSON.
        gone: set when the client hangs up.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def status(self, code: int, body: Any, **headers: str) -> None:
        """A whole answer; `body` is sent as it is if it is text."""
        payload = (body if isinstance(body, str) else json.dumps(body)).encode()
        lines = [
            f"HTTP/1.1 {code} X",
            f"content-type: {headers.pop('content_type', 'application/json')}",
            f"content-length: {len(payload)}",
        ]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + payload)
        await self.writer.drain()

    async def begin(self) -> None:
        """The head of a stream."""
        self.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await self.writer.drain()

    async def send(self, text: str) -> None:
        data = text.encode()
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()

    async def event(self, body: Any) -> None:
        await self.send(f"data: {json.dumps(body)}\n\n")

    async def piece(self, text: str | None = None, finish: str | None = None, **more: Any) -> None:
        if "messages" in self.body:
            choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}
        else:
            choice = {"index": 0, "text": text or "", "finish_reason": finish}
        await self.event({"choices": [choice | more]})

    async def usage(self, prompt: int = 7, completion: int = 3, **more: Any) -> None:
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **more}
        await self.event({"choices": [], "usage": usage})

    async def end(self) -> None:
        await self.send("data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def drop(self) -> None:
        """Hangs up in the middle of an answer."""
        self.writer.transport.abort()

    async def refuse(self, name: str, words: str = "Unsupported parameter: '{}' is not supported") -> None:
        await self.status(400, {"error": {"message": words.format(name), "type": "invalid_request_error"}})


Behaviour = Callable[[Exchange], Awaitable[None]]


async def well(exchange: Exchange) -> None:
    """Answers "the sum is 4" in three pieces."""
    if not exchange.body.get("stream"):
        message = {"role": "assistant", "content": "the sum is 4"}
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        await exchange.status(
            200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
        )
        return
    await exchange.begin()
    for text in ("the sum", " is", " 4"):
        await exchange.piece(text)
    await exchange.piece(finish="stop")
    if "stream_options" in exchange.body:
        await exchange.usage()
    await exchange.end()


async def half(exchange: Exchange) -> None:
    """Two tokens, without an end."""
    await exchange.begin()
    await exchange.piece("the")
    await exchange.piece(" sum")


class Misbehaving:
    """Plays one behaviour per request, then the last for ever.

    Attributes:
        asked: what came in, in order.
    """

    def __init__(self, *behaviours: Behaviour) -> None:
        self.behaviours, self.asked = list(behaviours) or [well], list[Exchange]()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Misbehaving:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def engine(self, **options: Any) -> OpenAIEngine:
        return OpenAIEngine(**{"model": "m", "base_url": self.base_url, "api_key": "", "patience": HASTY, **options})

    @property
    def bodies(self) -> Sequence[dict[str, Any]]:
        return [exchange.body for exchange in self.asked if exchange.method == "POST"]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client, or the test, has had enough
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        exchange = Exchange(method, path, headers, json.loads(body) if body else {}, writer)
        self.asked.append(exchange)
        if method == "GET":
            await exchange.status(200, {"data": [{"id": "served-one"}, {"id": "served-two"}]})
            return True
        number = len(self.bodies) - 1
        # The client sends nothing more before the answer, so all that can be read is that it hung up.
        hung_up = asyncio.ensure_future(reader.read(1))
        hung_up.add_done_callback(lambda _: exchange.gone.set())
        try:
            await self.behaviours[min(number, len(self.behaviours) - 1)](exchange)
        finally:
            hung_up.cancel()
            await asyncio.gather(hung_up, return_exceptions=True)
        return not writer.transport.is_closing()
