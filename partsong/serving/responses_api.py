"""Answers ``/v1/responses``: the same answers as chats, in the form that newer clients ask for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from partsong.errors import PartsongError
from partsong.serving.access.own_jobs import user_of
from partsong.serving.access.users import User
from partsong.serving.answers.chat_fields import read_body, read_fields
from partsong.serving.answers.replies import answer_text, begun, reply
from partsong.serving.answers.response_bodies import OTHER_FIELDS, ResponseBody
from partsong.serving.answers.response_events import ResponseReply
from partsong.serving.answers.response_format import ResponseForm
from partsong.serving.answers.response_store import KeptResponse, ResponseStore
from partsong.serving.errors import ApiError
from partsong.serving.texts.events import TextEvent
from partsong.serving.texts.served import ServedText
from partsong.serving.texts.thinking import SINGLE

__all__ = ["router"]

router = APIRouter(prefix="/v1/responses")

_log = logging.getLogger(__name__)


@router.post("")
async def create(request: Request) -> Response:
    """Answers a text or messages; with `background`, at once, and the answer is fetched later."""
    store: ResponseStore = request.app.state.server.responses
    user = user_of(request)

    async def respond(text: ServedText, strategy: str, fields: dict[str, Any]) -> Response:
        body = _read(fields, store, user)
        events = text.run(body.as_request(strategy, text.limits))
        # With one call, its text is the answer.
        form = ResponseForm(
            body=body, shows_thoughts=body.shows_threads and strategy.partition(":")[0] not in ("", SINGLE)
        )
        if body.background:
            await begun(request, events)
            return JSONResponse(_answer_later(events, form, store, user))
        answer = ResponseReply(form, partial(_keep, store, body, user))
        return await reply(request, events, answer, stream=body.stream, keep_alive=text.limits.keep_alive)

    return await answer_text(request, "/responses", read_fields(await request.body()), respond)


@router.get("/{name}")
async def one(name: str, request: Request, stream: bool = False) -> dict[str, Any]:
    """Returns a response, as far as it is."""
    if stream:
        raise ApiError(400, "a response is streamed while it is made, and not again; leave stream out", param="stream")
    return request.app.state.server.responses.find(name, user_of(request)).reply


@router.post("/{name}/cancel")
async def cancel(name: str, request: Request) -> dict[str, Any]:
    """Stops a response that is answered in the background."""
    kept: KeptResponse = request.app.state.server.responses.find(name, user_of(request))
    if kept.task is None:
        raise ApiError(
            400, f"response {name} was not asked for with background=true; hang up to stop one", code="not_background"
        )
    kept.task.cancel()
    await asyncio.gather(kept.task, return_exceptions=True)
    return kept.reply


@router.delete("/{name}")
async def delete(name: str, request: Request) -> dict[str, Any]:
    """Forgets a response, and stops it if it is not done."""
    store: ResponseStore = request.app.state.server.responses
    store.find(name, user_of(request))
    store.remove(name)
    return {"id": name, "object": "response", "deleted": True}


def _read(fields: dict[str, Any], store: ResponseStore, user: User) -> ResponseBody:
    """Reads a request, with the turns before it."""
    body = read_body(ResponseBody, fields, OTHER_FIELDS)
    if body.background and (body.stream or not body.store):
        raise ApiError(
            400, "background goes with store=true and without stream; change one of them", param="background"
        )
    if body.previous_response_id is None:
        return body
    before = store.find(body.previous_response_id, user, "previous_response_id")
    if before.reply["status"] not in ("completed", "incomplete"):
        state = f"response {body.previous_response_id} is {before.reply['status']}"
        raise ApiError(400, f"{state}; follow one that has an answer", param="previous_response_id")
    return body.after(before.turns)


def _keep(store: ResponseStore, body: ResponseBody, user: User, ended: dict[str, Any], text: str) -> None:
    if body.store:
        store.keep(KeptResponse(reply=ended, turns=(*body.turns, ("assistant", text)), owner=user.name))


def _answer_later(
    events: AsyncGenerator[TextEvent, None], form: ResponseForm, store: ResponseStore, user: User
) -> dict[str, Any]:
    """Goes on with an answer in the background; returns the response as it begins."""
    kept = KeptResponse(reply=form.begun(), turns=form.body.turns, owner=user.name)

    def note(ended: dict[str, Any], text: str) -> None:
        kept.reply, kept.turns = ended, (*form.body.turns, ("assistant", text))

    async def answer() -> None:
        written = ResponseReply(form, note)
        try:
            written.whole([event async for event in events])
        except PartsongError as error:
            written.fail(error)
        except Exception as error:  # noqa: BLE001 - it has no other way to be known
            _log.error("response %s failed", form.id, exc_info=error)
            written.fail(ApiError(500, "the server failed on this response; its log says why"))
        except asyncio.CancelledError:
            kept.reply = form.cancelled()
            raise
        finally:
            await events.aclose()

    kept.task = asyncio.create_task(answer())
    store.keep(kept)
    return kept.reply
