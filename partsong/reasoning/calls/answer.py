"""Holds the result of a thinking method, and finds the answer in a model's text by parsing, never by evaluating."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.reasoning.answers.extract import final_number
from partsong.reasoning.calls.call import Completion

__all__ = ["Answer", "Extract", "final_number", "vote_of"]

#: Finds the answer in a text, or returns None. Equivalent answers must give the same result.
Extract = Callable[[str], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Holds the result of a run.

    Attributes:
        answer: what was asked for, read from the text; None where no call named an answer.
        text: the text it was taken from.
        calls: names of the calls it was taken from.
        stopped: why there were no more calls. "done": all were made. "decided": no further vote could change the
            winner. "confident": a rule with a bounded error ended the run. "budget": it was spent.
        summary: what the run cost.
        details: further results of the strategy, such as shares of votes.
    """

    answer: str | None
    text: str
    calls: tuple[str, ...]
    stopped: str
    summary: Mapping[str, Any]
    details: Mapping[str, Any] = field(default_factory=dict)


def vote_of(completion: Completion, extract: Extract) -> str | None:
    """Returns the answer of a completion as a vote; None if it ran out of tokens, was cancelled, or names no answer."""
    return extract(completion.text) if completion.finish == "stop" else None
