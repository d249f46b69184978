"""Answers requests for text, as a whole or as server-sent events, for as long as their clients are there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from partsong.errors import PartsongError
from partsong.serving.answers.chat_format import chunks_of
from partsong.serving.answers.hangup import HUNG_UP, HungUpError, WatchedStream, unless_hung_up
from partsong.serving.texts.events import TextEvent
from partsong.serving.texts.reply_votes import ReplyVotes, needs_reply_votes
from partsong.serving.texts.served import ServedText, find_text
from partsong.serving.texts.thinking import SINGLE
from partsong.serving.texts.upstream import UpstreamText, with_model
from partsong.serving.waiting import STREAMED

__all__ = ["ReplyForm", "Respond", "answer_text", "begun", "reply"]

#: The endpoint whose replies can vote.
_CHATS = "/chat/completions"

#: Answers the fields of a request with a model and what stands after its name.
Respond = Callable[[ServedText, str, dict[str, Any]], Awaitable[Response]]


class ReplyForm(Protocol):
    """Writes one reply in the form that its endpoint has."""

    def whole(self, events: Sequence[TextEvent]) -> dict[str, Any]:
        """Returns the reply in one piece, from all that happened."""
        ...

    def begin(self) -> list[bytes]:
        """Returns what a stream begins with."""
        ...

    def tell(self, event: TextEvent) -> list[bytes]:
        """Returns what a stream says of an event."""
        ...

    def fail(self, error: PartsongError) -> list[bytes]:
        """Returns what ends a stream that cannot go on."""
        ...

    def end(self) -> list[bytes]:
        """Returns what comes after all events."""
        ...


async def answer_text(request: Request, path: str, fields: dict[str, Any], respond: Respond) -> Response:
    """Finds the model of a request and answers, or passes the request on where the model is another server's.

    Args:
        request: whose body has been read.
        path: of the endpoint at the other server, such as ``/chat/completions``.
        fields: of the body.
        respond: answers what is not passed on.
    """
    body, server = await request.body(), request.app.state.server
    asked = server.served_names.target(fields.get("model"))
    text, strategy = find_text(server.texts, asked)
    try:
        if isinstance(text, UpstreamText) and strategy in ("", SINGLE):
            named = body if fields["model"] == text.name else with_model(body, text.name)
            return await _pass_on(request, text, path, named)
        if isinstance(text, UpstreamText) and path == _CHATS and needs_reply_votes(fields):
            return await _vote(request, text, ReplyVotes.read(strategy, fields, text.name, text.limits), fields)
        return await respond(text, strategy, fields)
    except HungUpError:
        return Response(status_code=HUNG_UP)


async def begun(request: Request, events: AsyncGenerator[TextEvent, None]) -> None:
    """Waits until a request has been accepted: a bad one is refused before the reply begins, with its own status."""
    try:
        await unless_hung_up(request, _next(events))
    except BaseException:
        await events.aclose()
        raise


async def reply(
    request: Request, events: AsyncGenerator[TextEvent, None], form: ReplyForm, *, stream: bool, keep_alive: float
) -> Response:
    """Returns the reply to a request.

    Args:
        request: whose body has been read.
        events: what happens; they are closed when the reply or its client is gone.
        form: writes it.
        stream: whether it comes as server-sent events.
        keep_alive: seconds of silence before a comment.

    Raises:
        ApiError: the request is refused or gets no answer.
        HungUpError: the client is gone.
    """
    await begun(request, events)
    if stream:
        lines = _lines(form, events, keep_alive)
        return WatchedStream(lines, events.aclose, headers=STREAMED, media_type="text/event-stream")
    try:
        return JSONResponse(form.whole(await unless_hung_up(request, _all(events))))
    finally:
        await events.aclose()


async def _vote(request: Request, text: UpstreamText, votes: ReplyVotes, fields: dict[str, Any]) -> Response:
    whole = await unless_hung_up(request, text.vote(_CHATS, votes))
    whole["model"] = fields["model"]
    if not fields.get("stream"):
        return JSONResponse(whole)
    options = fields.get("stream_options")
    with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    return Response(b"".join(chunks_of(whole, with_usage=with_usage)), headers=STREAMED, media_type="text/event-stream")


async def _pass_on(request: Request, text: UpstreamText, path: str, body: bytes) -> Response:
    passed = await unless_hung_up(request, text.pass_through(path, body, request.headers))
    is_stream = passed.headers.get("content-type", "").startswith("text/event-stream")
    headers = passed.headers | ({"x-accel-buffering": STREAMED["X-Accel-Buffering"]} if is_stream else {})
    return WatchedStream(passed.chunks(), passed.close, status_code=passed.status, headers=headers)


async def _next(events: AsyncGenerator[TextEvent, None]) -> TextEvent:
    return await anext(events)


async def _all(events: AsyncGenerator[TextEvent, None]) -> list[TextEvent]:
    return [event async for event in events]


async def _lines(
    form: ReplyForm, events: AsyncGenerator[TextEvent, None], keep_alive: float
) -> AsyncGenerator[bytes, None]:
    """Yields the lines of a stream, and a comment whenever nothing has happened for a while."""
    for line in form.begin():
        yield line
    coming: asyncio.Future[TextEvent] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(events)) if coming is None else coming
            ready, _ = await asyncio.wait({coming}, timeout=keep_alive)
            if not ready:
                yield b": keep-alive\n\n"
                continue
            event, coming = coming.result(), None
            for line in form.tell(event):
                yield line
    except StopAsyncIteration:
        pass
    except PartsongError as error:
        for line in form.fail(error):
            yield line
        return
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
    for line in form.end():
        yield line
