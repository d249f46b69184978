"""Ends work for a client that has hung up, whether the reply comes as a whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

__all__ = ["HUNG_UP", "HungUpError", "WatchedStream", "unless_hung_up"]

#: Status of a reply that nobody receives.
HUNG_UP = 499

T = TypeVar("T")


class HungUpError(Exception):
    """Says that the client has gone, so there is no one to reply to."""


async def unless_hung_up(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of some work; if the client hangs up first, cancels the work and waits for its end.

    Args:
        request: whose body has been read.
        work: what is done for it.

    Raises:
        HungUpError: the client is gone.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUpError
        return task.result()
    finally:
        await _end(task, gone)


class WatchedStream(StreamingResponse):
    """Streams a reply until it ends or the client hangs up, and ends the work for it in both cases.

    Args:
        chunks: the reply.
        end: ends the work; called once, also if no chunk was ever asked for.
        status_code: status of HTTP.
        headers: of the reply.
        media_type: kind of the body, where the headers do not say it.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        end: Callable[[], Awaitable[None]],
        *,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
    ) -> None:
        super().__init__(chunks, status_code=status_code, headers=headers, media_type=media_type)
        self._chunks, self._end = chunks, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the reply; see ASGI."""
        sending = asyncio.ensure_future(self.stream_response(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                with contextlib.suppress(OSError):  # the client may hang up while data is being sent
                    sending.result()
        finally:
            await _end(sending, gone)
            await self._chunks.aclose()
            await self._end()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
