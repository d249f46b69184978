"""Writes answers as clients of chats and of texts read them: as a whole, or as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partsong.errors import PartsongError
from partsong.serving.answers.chat_bodies import ChatBody, CompletionBody
from partsong.serving.errors import as_api_error
from partsong.serving.texts.events import TextDelta, TextDone, TextEvent, ThreadNews

__all__ = ["ChatForm", "chunks_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatForm:
    """Writes one reply, in the form for chats or for texts; see `ReplyForm`.

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
    def of(cls, body: CompletionBody) -> ChatForm:
        """Returns the form that a request asks for."""
        return cls(model=body.model, chat=isinstance(body, ChatBody), usage=body.options.include_usage)

    def whole(self, events: Sequence[TextEvent]) -> dict[str, Any]:
        """Returns the reply in one piece."""
        done = events[-1]
        assert isinstance(done, TextDone)
        if self.chat:
            content: dict[str, Any] = {"message": {"role": "assistant", "content": done.text, "refusal": None}}
        else:
            content = {"text": done.text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": done.finish}
        head = self._head("chat.completion" if self.chat else "text_completion")
        return {**head, "choices": [choice], "usage": _usage(done), "partsong": dict(done.report)}

    def begin(self) -> list[bytes]:
        """Returns the chunks before the text."""
        return [_line(self._chunk({"role": "assistant", "content": ""}))] if self.chat else []

    def tell(self, event: TextEvent) -> list[bytes]:
        """Returns the chunks for an event."""
        return [_line(chunk) for chunk in self._chunks(event)]

    def fail(self, error: PartsongError) -> list[bytes]:
        """Returns what ends a stream that cannot go on."""
        return [_line(as_api_error(error).as_json())]

    def end(self) -> list[bytes]:
        """Returns what comes after all events."""
        return [b"data: [DONE]\n\n"]

    def _chunks(self, event: TextEvent) -> list[dict[str, Any]]:
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


def chunks_of(reply: Mapping[str, Any], *, with_usage: bool) -> list[bytes]:
    """Returns a whole reply of a chat as the chunks of a stream: its message, its end, and what it cost.

    Args:
        reply: in one piece.
        with_usage: whether the number of tokens is a chunk, too.
    """
    head = {name: reply.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choice = reply["choices"][0]
    delta = {name: value for name, value in choice["message"].items() if value is not None}
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {
            **head,
            "choices": [{"index": 0, "delta": {}, "finish_reason": choice.get("finish_reason")}],
            "partsong": reply.get("partsong"),
        },
    ]
    if with_usage:
        chunks.append({**head, "choices": [], "usage": reply.get("usage")})
    return [*map(_line, chunks), b"data: [DONE]\n\n"]


def _line(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


def _usage(done: TextDone) -> dict[str, Any]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }
