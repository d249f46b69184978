"""Writes answers as clients of the OpenAI API read them: as a whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.errors import PartsongError
from partsong.serving.chat_bodies import AnswerBody, ChatBody
from partsong.serving.errors import as_api_error
from partsong.serving.texts.events import TextDelta, TextDone, TextEvent, ThreadNews

__all__ = ["ReplyForm", "sse_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyForm:
    """Writes one reply, in the form for chats or for texts.

    Attributes:
        model: the name that the request gave.
        chat: whether it is a chat.
        usage: whether a stream ends with the number of tokens.
        id: name of the reply.
        created: seconds since 1970.
    """

    model: str
    chat: bool
    usage: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, body: AnswerBody) -> ReplyForm:
        """Returns the form that a request asks for."""
        return cls(model=body.model, chat=isinstance(body, ChatBody), usage=body.options.include_usage)

    def whole(self, done: TextDone) -> dict[str, Any]:
        """Returns the reply in one piece."""
        if self.chat:
            content: dict[str, Any] = {"message": {"role": "assistant", "content": done.text, "refusal": None}}
        else:
            content = {"text": done.text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": done.finish}
        head = self._head("chat.completion" if self.chat else "text_completion")
        return {**head, "choices": [choice], "usage": _usage(done), "partsong": dict(done.report)}

    def first(self) -> list[dict[str, Any]]:
        """Returns the chunks before the text."""
        return [self._chunk({"role": "assistant", "content": ""})] if self.chat else []

    def chunks(self, event: TextEvent) -> list[dict[str, Any]]:
        """Returns the chunks for an event."""
        if isinstance(event, TextDelta):
            return [self._chunk({"content": event.text} if self.chat else event.text)]
        if isinstance(event, ThreadNews):
            news = {"thread": event.thread, "label": event.label, "text": event.text, "status": event.status}
            return [{**self._part_head(), "choices": [], "partsong": news}]
        if not isinstance(event, TextDone):
            return []
        last = self._chunk({} if self.chat else "", event.finish)
        chunks = [{**last, "partsong": dict(event.report)}]
        if self.usage:
            report = dict(event.report)
            chunks.append({**self._part_head(), "choices": [], "usage": _usage(event), "partsong": report})
        return chunks

    def _chunk(self, content: Mapping[str, Any] | str, finish: str | None = None) -> dict[str, Any]:
        name = "delta" if self.chat else "text"
        choice = {"index": 0, name: content, "logprobs": None, "finish_reason": finish}
        return {**self._part_head(), "choices": [choice]}

    def _part_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


async def sse_of(
    form: ReplyForm, events: AsyncGenerator[TextEvent, None], keep_alive: float
) -> AsyncGenerator[bytes, None]:
    """Yields the server-sent events of a reply, and a comment whenever nothing has happened for a while.

    Args:
        form: writes the chunks.
        events: what happens.
        keep_alive: seconds of silence before a comment.
    """
    for chunk in form.first():
        yield _line(chunk)
    coming: asyncio.Future[TextEvent] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(events)) if coming is None else coming
            ready, _ = await asyncio.wait({coming}, timeout=keep_alive)
            if not ready:
                yield b": keep-alive\n\n"
                continue
            event, coming = coming.result(), None
            for chunk in form.chunks(event):
                yield _line(chunk)
    except StopAsyncIteration:
        pass
    except PartsongError as error:
        yield _line(as_api_error(error).as_json())
        return
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
    yield b"data: [DONE]\n\n"


def _line(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


def _usage(done: TextDone) -> dict[str, Any]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }
