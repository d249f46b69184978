"""Writes the objects of ``/v1/responses``: the response, its items and its usage."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from partsong.errors import PartsongError
from partsong.serving.answers.response_bodies import ResponseBody
from partsong.serving.texts.events import TextDone, TextEvent, ThreadNews

__all__ = ["ResponseForm", "summary_part", "text_part", "thoughts_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseForm:
    """Writes one response as it begins, and as it ends.

    Attributes:
        body: the request.
        shows_thoughts: whether the response has an item with what was thought.
        name: the part of all names that is its own.
        created: seconds since 1970.
    """

    body: ResponseBody
    shows_thoughts: bool
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """Returns the name of the response."""
        return f"resp_{self.name}"

    def begun(self) -> dict[str, Any]:
        """Returns the response before it has text."""
        return self._response("in_progress")

    def done(self, done: TextDone, thoughts: Sequence[str]) -> dict[str, Any]:
        """Returns the response at its end.

        Args:
            done: the answer.
            thoughts: what each call has written, where it is shown.
        """
        whole = done.finish == "stop"
        status = "completed" if whole else "incomplete"
        items = [self.thoughts(thoughts)] if thoughts else []
        return self._response(
            status,
            output=[*items, self.message(done.text, status)],
            incomplete_details=None if whole else {"reason": "max_output_tokens"},
            completed_at=int(time.time()) if whole else None,
            usage=_usage(done),
            partsong=dict(done.report),
        )

    def failed(self, error: PartsongError) -> dict[str, Any]:
        """Returns a response that got no answer."""
        return self._response("failed", error={"code": "server_error", "message": str(error)})

    def cancelled(self) -> dict[str, Any]:
        """Returns a response that was dropped."""
        return self._response("cancelled")

    def message(self, text: str | None, status: str) -> dict[str, Any]:
        """Returns the item with the answer; without a text it has no part yet."""
        content = [] if text is None else [text_part(text)]
        head = {"id": f"msg_{self.name}", "type": "message", "role": "assistant"}
        return {**head, "status": status, "content": content}

    def thoughts(self, thoughts: Sequence[str], status: str = "completed") -> dict[str, Any]:
        """Returns the item with what was thought, a part for each call."""
        summary = [summary_part(text) for text in thoughts]
        return {"id": f"rs_{self.name}", "type": "reasoning", "status": status, "summary": summary}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        body = self.body
        given = ("background", "instructions", "max_output_tokens", "model", "previous_response_id", "store", "user")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **{name: getattr(body, name) for name in (*given, "temperature", "top_p")},
            "metadata": body.metadata or {},
            "output": [],
            "parallel_tool_calls": True,
            "reasoning": {"effort": None, "summary": body.summary},
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": None,
            **more,
        }


def text_part(text: str) -> dict[str, Any]:
    """Returns the part of a message that holds its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def summary_part(text: str) -> dict[str, Any]:
    """Returns the part with the thoughts of one call."""
    return {"type": "summary_text", "text": text}


def thoughts_of(events: Sequence[TextEvent]) -> list[str]:
    """Returns what each call has written, in the order in which they began."""
    texts: dict[str, str] = {}
    for event in events:
        if isinstance(event, ThreadNews):
            texts[event.thread] = texts.get(event.thread, "") + event.text
    return list(texts.values())


def _usage(done: TextDone) -> dict[str, Any]:
    """Counts all tokens; those of no call whose text is the answer count as thinking."""
    thought = max(0, done.completion_tokens - (done.report["tokens_accepted"] or 0))
    return {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": done.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": done.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": done.prompt_tokens + done.completion_tokens,
    }
