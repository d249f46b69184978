"""Describes a request for text and what happens while it is answered, in values that go through JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["TextAccepted", "TextDelta", "TextDone", "TextEvent", "TextRequest", "ThreadNews", "event_of", "record_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """Says what to answer, and how.

    Attributes:
        messages: role and text of each message; one of the user for a text to continue.
        plain: whether the text is continued as it stands, without a chat template.
        strategy: what follows the model's name: ``NAME:key=value,...`` of a thinking method or a rule, or "".
        seed: of all draws.
        max_tokens: most tokens of one answer; None leaves it to the model.
        temperature: None is 1 for thinking and 0 for a diffusion language model.
        top_p: share of the probability that is drawn from.
        stop: strings that end an answer.
        extract: how an answer is found in a text (a name of `EXTRACTORS`); None leaves it to the model's task.
        budget_tokens: most tokens of all calls.
        budget_calls: most calls.
        budget_seconds: most seconds.
        cache: ``NAME:key=value,...`` of a cache, for diffusion language models.
        block_size: positions decided together, for diffusion language models.
        threads: whether to report what each call writes.
    """

    messages: tuple[tuple[str, str], ...]
    plain: bool = False
    strategy: str = ""
    seed: int = 0
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    extract: str | None = None
    budget_tokens: int | None = None
    budget_calls: int | None = None
    budget_seconds: float | None = None
    cache: str | None = None
    block_size: int | None = None
    threads: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns the request as JSON has it; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TextRequest:
        """Reads what `as_json` wrote."""
        messages = tuple((role, text) for role, text in record["messages"])
        return cls(**{**record, "messages": messages, "stop": tuple(record["stop"])})


@dataclass(frozen=True, slots=True)
class TextAccepted:
    """Says that a request has been checked and is being answered."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Holds text of the answer that is new and will not change."""

    text: str


@dataclass(frozen=True, slots=True)
class ThreadNews:
    """Tells what a call of the request has written.

    Attributes:
        thread: id of the call.
        label: the branch that it belongs to, and which of its samples it is.
        text: what is new in its text.
        status: state of the call.
    """

    thread: str
    label: str
    text: str
    status: Literal["running", "finished", "cancelled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDone:
    """Holds the whole answer.

    Attributes:
        text: all of it.
        finish: "stop" if the text ended by itself, "length" if its tokens ran out.
        prompt_tokens: tokens of all prompts.
        cached_tokens: how many of them had been computed before.
        completion_tokens: tokens of all calls, discarded ones included.
        report: what the answer cost, by name.
    """

    text: str
    finish: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    report: Mapping[str, Any]


TextEvent = TextAccepted | TextDelta | ThreadNews | TextDone
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (TextAccepted, TextDelta, ThreadNews, TextDone)}


def record_of(event: TextEvent) -> dict[str, Any]:
    """Returns an event as JSON has it.

    >>> record_of(TextDelta("4"))
    {'kind': 'TextDelta', 'text': '4'}
    """
    return {"kind": type(event).__name__, **asdict(event)}


def event_of(record: Mapping[str, Any]) -> TextEvent:
    """Reads what `record_of` wrote."""
    return _KINDS[record["kind"]](**{name: value for name, value in record.items() if name != "kind"})
