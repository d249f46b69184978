"""Writes a response of ``/v1/responses`` in one piece, or as typed events in the order that clients expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from partsong.errors import PartsongError
from partsong.serving.answers.response_format import ResponseForm, summary_part, text_part, thoughts_of
from partsong.serving.texts.events import TextDelta, TextDone, TextEvent, ThreadNews
from partsong.serving.waiting import event as line_of

__all__ = ["ResponseReply"]


class ResponseReply:
    """Writes one response; see `ReplyForm`.

    Args:
        form: writes its objects.
        keep: is given the response and its text at its end.
    """

    def __init__(self, form: ResponseForm, keep: Callable[[dict[str, Any], str], None]) -> None:
        self._form, self._keep = form, keep
        self._number, self._text = 0, ""
        self._thoughts: dict[str, str] = {}
        self._writes = False

    def whole(self, events: Sequence[TextEvent]) -> dict[str, Any]:
        """Returns the response in one piece."""
        done = events[-1]
        assert isinstance(done, TextDone)
        return self._ended(done, thoughts_of(events) if self._form.shows_thoughts else [])

    def begin(self) -> list[bytes]:
        """Returns the events before the text."""
        begun = self._form.begun()
        return [self._line(f"response.{state}", response=begun) for state in ("created", "in_progress")]

    def tell(self, event: TextEvent) -> list[bytes]:
        """Returns the events that tell of one."""
        if isinstance(event, ThreadNews) and self._form.shows_thoughts and not self._writes:
            return self._think(event)
        if isinstance(event, TextDelta):
            return [*self._begin_text(), self._write(event.text)]
        return self._finish(event) if isinstance(event, TextDone) else []

    def fail(self, error: PartsongError) -> list[bytes]:
        """Returns what ends a stream that cannot go on."""
        failed = self._form.failed(error)
        self._keep(failed, self._text)
        return [self._line("response.failed", response=failed)]

    def end(self) -> list[bytes]:
        """Returns nothing: the last event says that it is the last."""
        return []

    def _ended(self, done: TextDone, thoughts: Sequence[str]) -> dict[str, Any]:
        ended = self._form.done(done, thoughts)
        self._keep(ended, done.text)
        return ended

    def _think(self, news: ThreadNews) -> list[bytes]:
        lines = []
        if not self._thoughts:
            lines.append(self._item("added", self._form.thoughts([], "in_progress")))
        if news.thread not in self._thoughts:
            self._thoughts[news.thread] = ""
            place = len(self._thoughts) - 1
            lines.append(self._thought("part.added", place, part=summary_part("")))
        if news.text:
            self._thoughts[news.thread] += news.text
            lines.append(self._thought("text.delta", list(self._thoughts).index(news.thread), delta=news.text))
        return lines

    def _end_thoughts(self) -> list[bytes]:
        lines = []
        for place, text in enumerate(self._thoughts.values()):
            lines.append(self._thought("text.done", place, text=text))
            lines.append(self._thought("part.done", place, part=summary_part(text)))
        return [*lines, self._item("done", self._form.thoughts(list(self._thoughts.values())))] if lines else []

    def _begin_text(self) -> list[bytes]:
        if self._writes:
            return []
        lines, self._writes = self._end_thoughts(), True
        return [
            *lines,
            self._item("added", self._form.message(None, "in_progress")),
            self._part("content_part.added", part=text_part("")),
        ]

    def _write(self, text: str) -> bytes:
        self._text += text
        return self._part("output_text.delta", delta=text, logprobs=[])

    def _finish(self, done: TextDone) -> list[bytes]:
        lines = self._begin_text()
        ended = self._ended(done, list(self._thoughts.values()))
        return [
            *lines,
            self._part("output_text.done", text=done.text, logprobs=[]),
            self._part("content_part.done", part=text_part(done.text)),
            self._item("done", ended["output"][-1]),
            self._line(f"response.{ended['status']}", response=ended),
        ]

    def _item(self, what: str, item: dict[str, Any]) -> bytes:
        place = 1 if item["type"] == "message" and self._thoughts else 0
        return self._line(f"response.output_item.{what}", output_index=place, item=item)

    def _part(self, kind: str, **more: Any) -> bytes:
        where = {"item_id": f"msg_{self._form.name}", "output_index": int(bool(self._thoughts)), "content_index": 0}
        return self._line(f"response.{kind}", **where, **more)

    def _thought(self, kind: str, place: int, **more: Any) -> bytes:
        where = {"item_id": f"rs_{self._form.name}", "output_index": 0, "summary_index": place}
        return self._line(f"response.reasoning_summary_{kind}", **where, **more)

    def _line(self, kind: str, **more: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return line_of(kind, json.dumps(data, ensure_ascii=False)).encode("utf-8", "replace")
