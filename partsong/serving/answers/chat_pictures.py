"""Answers chats whose model makes pictures: the last message is the prompt, its pictures are those to begin with."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field, ValidationError

from partsong.serving.access.own_jobs import user_of
from partsong.serving.errors import ApiError, invalid, leaving
from partsong.serving.fields import SamplingBody
from partsong.serving.files.sent_pictures import check_pictures, kept_pictures, read_data_url
from partsong.serving.jobs import Job
from partsong.serving.server import Server
from partsong.serving.services import PictureService
from partsong.serving.waiting import STREAMED, completed, events_while_there, failure

__all__ = ["draw_in_chat"]

#: Fields of chats that say how text is written, which ask for nothing of a picture.
_OF_TEXT = {
    *("max_completion_tokens", "max_tokens", "modalities", "stream_options", "temperature", "tool_choice", "tools"),
    *("top_p", "parallel_tool_calls", "frequency_penalty", "presence_penalty"),
}


class _PictureBody(SamplingBody):
    n: int = 1
    stream: bool = False
    height: int | None = None
    width: int | None = None
    strength: Annotated[float, Field(gt=0, le=1)] | None = None


async def draw_in_chat(request: Request, model: PictureService, fields: Mapping[str, Any]) -> Response:
    """Makes pictures for the last message of a chat; the reply holds them as its content.

    Args:
        request: whose body has been read.
        model: makes them.
        fields: of the body.

    Raises:
        ApiError: the chat does not end with a prompt, or a field asks for what the model does not make.
    """
    server: Server = request.app.state.server
    prompt, pictures = _asked(fields.get("messages"))
    own = {name: value for name, value in fields.items() if name != "messages" and name not in _OF_TEXT}
    try:
        body = _PictureBody.model_validate({**own, "prompt": prompt})
    except ValidationError as error:
        raise invalid(error.errors()[0]) from None
    if body.height is not None and body.width is not None:
        body.size = f"{body.width}x{body.height}"
    if pictures:
        check_pictures(await server.rooms[model.name].facts(), model.name, len(pictures), 0, "messages")
    asked = body.asked(server.limits, num=body.n, strength=body.strength)
    async with kept_pictures(server, pictures, field="messages") as kept:
        job = await server.submit(model, {**asked, **kept}, user=user_of(request))
    if body.stream:
        return StreamingResponse(_stream(server, job, model), media_type="text/event-stream", headers=STREAMED)
    job = await completed(server, job, request)
    message = {"role": "assistant", "content": await asyncio.to_thread(_content, server, job)}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return JSONResponse({**_head(job, model, "chat.completion"), "choices": [choice], "partsong": job.as_json()})


def _asked(messages: Any) -> tuple[str, list[bytes]]:
    """Returns the prompt and the pictures of the last message."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "user":
        raise ApiError(400, "the last of messages is the prompt; give it the role user", param="messages")
    content = last.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts, pictures = list[str](), list[bytes]()
    for part in parts if isinstance(parts, list) else []:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image_url" and isinstance(part.get("image_url"), dict):
            pictures.append(read_data_url(part["image_url"].get("url"), "messages"))
        else:
            raise ApiError(400, f"a prompt has parts of the types text and image_url, not {kind!r}", param="messages")
    return "\n".join(texts), pictures


def _head(job: Job, model: PictureService, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{job.id}", "object": kind, "created": int(job.created_at), "model": model.name}


def _content(server: Server, job: Job) -> list[dict[str, Any]]:
    urls = [base64.b64encode(server.file(name).read_bytes()).decode() for name in job.files]
    return [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{url}"}} for url in urls]


async def _stream(server: Server, job: Job, model: PictureService) -> AsyncIterator[str]:
    """Yields the whole reply in one chunk once it is there, and comments before."""
    heard = time.monotonic()
    async for _ in events_while_there(server, job):
        if time.monotonic() - heard > 1.0:
            heard = time.monotonic()
            yield ": waiting\n\n"
    if job.status != "completed":
        error = failure(job) if job.has_ended else server.hindrance(job) or leaving()
        yield f"data: {json.dumps(error.as_json())}\n\n"
        return
    head = _head(job, model, "chat.completion.chunk")
    delta = {"role": "assistant", "content": await asyncio.to_thread(_content, server, job)}
    whole = {"index": 0, "delta": delta, "finish_reason": "stop"}
    yield f"data: {json.dumps({**head, 'choices': [whole], 'partsong': job.as_json()})}\n\ndata: [DONE]\n\n"
