"""Holds a text that splits into threads, as it is being written, and describes the place where one is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from partsong.reasoning.calls.call import Completion, Message
from partsong.reasoning.calls.text_tree import Fork, Part

__all__ = ["ThreadPlace", "ThreadText"]


@dataclass(slots=True)
class ThreadText:
    """Holds what has been written of a text, and of the threads in it.

    Attributes:
        calls: the calls that wrote it and its threads, in reading order.
        children: separate threads.
        notes: where the text departs from the format, with the branch.
        finish: "stop" if the text is whole, "length" if its tokens ran out, "budget" if the run's did. Empty while it
            is written.
        roots: calls that read nothing of the text: the first one, or those of its threads where it begins with a fork.
        last: the call that wrote its end; None where threads did.
        own_tokens: tokens it has written outside of its threads, in `own_calls` calls.
    """

    parts: list[Part] = field(default_factory=list)
    calls: list[Completion] = field(default_factory=list)
    children: list[ThreadText] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    finish: Literal["", "stop", "length", "budget"] = ""
    roots: list[Completion] = field(default_factory=list)
    last: Completion | None = None
    own_tokens: int = 0
    own_calls: int = 0

    @property
    def all_calls(self) -> list[Completion]:
        """Returns the calls of the text and those of separate threads."""
        return [*self.calls, *(call for child in self.children for call in child.all_calls)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadPlace:
    """Describes where a text is written.

    Attributes:
        chat: messages before it.
        before: the text up to the fork it is a thread of.
        opener: beginning of the text.
        closer: end of the text; empty if it is not a thread.
        mark: its thought embedding; 0 where it has none.
        path: path of its calls.
        depth: number of forks around it.
    """

    chat: tuple[Message, ...]
    before: tuple[Part, ...] = ()
    opener: str = ""
    closer: str = ""
    mark: int = 0
    path: tuple[str, ...] = ()
    depth: int = 0

    def messages(self, parts: Sequence[Part]) -> tuple[Message, ...]:
        """Returns the chat that the next call reads, given the parts of the text that are there."""
        inside = (*([self.opener] if self.opener else []), *parts)
        text = (*self.before, Fork((inside,), marks=(self.mark,))) if self.mark else (*self.before, *inside)
        # Separate threads are texts of their own.
        text = tuple(part for part in text if not (isinstance(part, Fork) and part.apart))
        return (*self.chat, Message("assistant", text)) if text else self.chat

    def note(self, words: str) -> str:
        """Returns a note of what happened here, with the branch."""
        return f"{'/'.join(self.path)}: {words}" if self.path else words
