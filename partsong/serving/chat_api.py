"""Answers ``POST /v1/chat/completions`` and ``POST /v1/completions``; a model's name may include a thinking method.

A model's name alone asks it once. ``NAME:STRATEGY:key=value,...`` asks it by a thinking method, and
``NAME:RULE:key=value,...`` decodes a diffusion language model by a rule. Requests for models of another server
are passed through unchanged where no method is named.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from partsong.serving.chat_bodies import AnswerBody, ChatBody, TextBody
from partsong.serving.chat_fields import read_body, read_fields
from partsong.serving.chat_format import ReplyForm, sse_of
from partsong.serving.hangup import HungUpError, WatchedStream, unless_hung_up
from partsong.serving.texts.events import TextDone, TextEvent
from partsong.serving.texts.served import ServedText, find_text
from partsong.serving.texts.thinking import SINGLE
from partsong.serving.texts.upstream import UpstreamText, with_model
from partsong.serving.waiting import STREAMED

__all__ = ["router"]

router = APIRouter()

#: Status of a reply that is not read.
_HUNG_UP = 499


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answers in a chat, with a rule or a thinking method that the name of the model may hold."""
    return await _reply(request, ChatBody)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Continues a text."""
    return await _reply(request, TextBody)


async def _reply(request: Request, kind: type[AnswerBody]) -> Response:
    body = await request.body()
    fields = read_fields(body)
    text, strategy = find_text(request.app.state.server.texts, fields.get("model"))
    try:
        if isinstance(text, UpstreamText) and strategy in ("", SINGLE):
            return await _pass_through(request, text, with_model(body, text.name) if strategy else body)
        return await _answer(request, text, strategy, read_body(kind, fields))
    except HungUpError:
        return Response(status_code=_HUNG_UP)


async def _pass_through(request: Request, text: UpstreamText, body: bytes) -> Response:
    path = request.url.path.removeprefix("/v1")
    reply = await unless_hung_up(request, text.pass_through(path, body, request.headers))
    return WatchedStream(reply.chunks(), reply.close, status_code=reply.status, headers=reply.headers)


async def _answer(request: Request, text: ServedText, strategy: str, body: AnswerBody) -> Response:
    events, form = text.run(body.as_request(strategy, text.limits)), ReplyForm.of(body)
    try:
        # A bad request is refused before the reply begins, so that the refusal has its own status.
        await unless_hung_up(request, _next(events))
        if not body.stream:
            return JSONResponse(form.whole(await unless_hung_up(request, _last(events))))
    except BaseException:
        await events.aclose()
        raise
    chunks = sse_of(form, events, text.limits.keep_alive)
    return WatchedStream(chunks, events.aclose, headers=STREAMED, media_type="text/event-stream")


async def _next(events: AsyncGenerator[TextEvent, None]) -> TextEvent:
    return await anext(events)


async def _last(events: AsyncGenerator[TextEvent, None]) -> TextDone:
    done: TextDone | None = None
    async for event in events:
        done = event if isinstance(event, TextDone) else None
    assert done is not None
    return done
