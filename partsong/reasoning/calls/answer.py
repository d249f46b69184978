"""What a strategy returns, and how an answer is found in a model's text: by reading, never by evaluating."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.reasoning.answers.extract import final_number
from partsong.reasoning.calls.call import Completion

__all__ = ["Answer", "Extract", "final_number", "vote_of"]

#: Finds an answer in a text; None where there is none. Answers that mean the same must come out the same.
Extract = Callable[[str], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The end of a run.

    Attributes:
        answer: what was asked for, read from the text; None where nobody found any.
        text: the text it was taken from.
        calls: names of the calls it was taken from.
        stopped: why there were no more calls: "done"; "decided", the vote could not change any more; "confident", a
            rule that may err, by no more than it says, ended it; "budget".
        summary: what the run cost.
        details: what the strategy has to say beyond that, such as shares of votes.
    """

    answer: str | None
    text: str
    calls: tuple[str, ...]
    stopped: str
    summary: Mapping[str, Any]
    details: Mapping[str, Any] = field(default_factory=dict)


def vote_of(completion: Completion, extract: Extract) -> str | None:
    """The answer of a completion as a vote: None if it ran out of tokens, was cancelled, or names none."""
    return extract(completion.text) if completion.finish == "stop" else None
