"""Answers ``POST /v1/chat/completions`` and ``POST /v1/completions``; a model's name may include a thinking method.

A model's name alone asks it once. ``NAME:STRATEGY:key=value,...`` asks it by a thinking method, and
``NAME:RULE:key=value,...`` decodes a diffusion language model by a rule. Requests for models of another server
are passed through unchanged where no method is named.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from partsong.serving.answers.chat_bodies import ChatBody, CompletionBody, TextBody
from partsong.serving.answers.chat_fields import read_body, read_fields
from partsong.serving.answers.chat_format import ChatForm
from partsong.serving.answers.chat_pictures import draw_in_chat
from partsong.serving.answers.replies import answer_text, reply
from partsong.serving.errors import ApiError
from partsong.serving.texts.served import ServedText

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answers in a chat, with a rule or a thinking method that the name of the model may hold, or with pictures."""
    fields, server = read_fields(await request.body()), request.app.state.server
    asked = server.served_names.target(fields.get("model"))
    drawing = next((model for model in server.models if model.name == asked), None)
    if drawing is not None and drawing.kind == "video":
        raise ApiError(400, f"{drawing.name} makes videos; ask /v1/videos for one", param="model")
    if drawing is not None:
        return await draw_in_chat(request, drawing, fields)
    return await _answer(request, "/chat/completions", fields, ChatBody)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Continues a text."""
    return await _answer(request, "/completions", read_fields(await request.body()), TextBody)


async def _answer(request: Request, path: str, fields: dict[str, Any], kind: type[CompletionBody]) -> Response:
    async def respond(text: ServedText, strategy: str, fields: dict[str, Any]) -> Response:
        body = read_body(kind, fields)
        events = text.run(body.as_request(strategy, text.limits))
        return await reply(request, events, ChatForm.of(body), stream=body.stream, keep_alive=text.limits.keep_alive)

    return await answer_text(request, path, fields, respond)
