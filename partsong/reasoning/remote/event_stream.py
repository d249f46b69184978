"""Reads a stream of server-sent events as the standard says, and as servers that follow it loosely write it.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html. Beyond it, an event may end with the stream, and
may hold an object on each of its lines.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any

from partsong.reasoning.remote.errors import ServerFailedError
from partsong.whole_text import whole_text

__all__ = ["events_of"]

#: Seconds to wait for the end of a stream whose last event has come: a connection is used again once it is read out.
_LAST = 0.5
#: Stands for the end of a stream.
_DONE = object()
#: Most characters of a server's own words in a message.
_WORDS = 300


async def events_of(chunks: AsyncIterator[bytes], clean: Callable[[str], str]) -> AsyncIterator[Any]:
    """Yields the JSON value of each event of a stream, up to ``[DONE]``.

    Args:
        chunks: the bytes as they come, cut anywhere.
        clean: takes secrets out of a text.

    Raises:
        ServerFailedError: the server reports an error as an event, whatever form that has; its words are kept.
        ValueError: an event is no JSON.
    """
    async with aclosing(_fields(chunks)) as events:
        async for kind, data in events:
            if kind == "error":
                raise _failed(data or "it named no reason", clean)
            if not data or (kind not in ("", "message") and data[0] not in "{["):  # such as a ping
                continue
            for value in _values(data):
                if value is _DONE:
                    await _read_out(chunks)
                    return
                if isinstance(value, dict) and (value.get("error") or value.get("object") == "error"):
                    raise _failed(value.get("error") or value, clean)
                yield value


async def _read_out(chunks: AsyncIterator[bytes]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_LAST):
            async for _ in chunks:
                pass


async def _fields(chunks: AsyncIterator[bytes]) -> AsyncGenerator[tuple[str, str], None]:
    """Yields the name and the data of each event."""
    kind, data = "", list[str]()
    async with aclosing(_lines(chunks)) as lines:
        async for line in lines:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if not line:
                if data or kind == "error":
                    yield kind, "\n".join(data).strip()
                kind, data = "", []
            elif name == "data":
                data.append(value)
            elif name == "event":
                kind = value.strip()
    # One that broke off is none, and the reply will miss its end.
    rest = "\n".join(data).strip()
    if kind == "error" or (rest and _is_whole(rest)):
        yield kind, rest


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    """Yields lines without their ends, CR, LF or both; what follows the last end is a line, too."""
    rest, is_first = b"", True
    async for chunk in chunks:
        rest += chunk
        if is_first and len(rest) >= 3:
            rest, is_first = rest.removeprefix(b"\xef\xbb\xbf"), False
        # A CR at the end may be half of an end.
        held = b"\r" if rest.endswith(b"\r") else b""
        *whole, rest = _split(rest.removesuffix(held))
        rest += held
        for line in whole:
            yield line.decode()
    for line in _split(rest):
        yield line.decode()


def _split(text: bytes) -> list[bytes]:
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")


def _values(data: str) -> list[Any]:
    """Reads the value of an event, or those of its lines."""
    try:
        return [_value(data)]
    except ValueError:
        lines = data.split("\n")
        if len(lines) == 1:
            raise
        return [_value(line) for line in lines if line.strip()]


def _value(text: str) -> Any:
    return _DONE if text.lstrip().startswith("[DONE]") else json.loads(text)


def _is_whole(data: str) -> bool:
    with suppress(ValueError):
        return bool(_values(data))
    return False


def _failed(body: Any, clean: Callable[[str], str]) -> ServerFailedError:
    """Returns the error of a server that failed, with its own words in one line."""
    words = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    line = " ".join(clean(whole_text(words)).split())
    line = line if len(line) <= _WORDS else line[: _WORDS - 3] + "..."
    return ServerFailedError(f"the server failed in the middle of an answer: {line}", words=line)
