"""What a strategy returns, and how an answer is found in a model's text: by reading, never by evaluating."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from partsong.reasoning.call import Completion

__all__ = ["Answer", "Extract", "final_number", "vote_of"]

#: Finds an answer in a text; None where there is none. Answers that mean the same must come out the same.
Extract = Callable[[str], str | None]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The end of a run.

    Attributes:
        answer: what was asked for, read from the text; None where nobody found any.
        text: the text it was taken from.
        calls: names of the calls it was taken from.
        stopped: why there were no more calls: "done"; "decided", the vote could not change any more; "budget".
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


def final_number(text: str) -> str | None:
    r"""The number in the last ``\boxed{}``, or else the last number of a text, in lowest terms.

    >>> final_number("6 of 8, that is \\boxed{6/8}."), final_number("1,200.50 dollars"), final_number("none")
    ('3/4', '2401/2', None)
    """
    boxed = _BOXED.findall(text)
    found = _NUMBER.findall(boxed[-1]) if boxed else []
    found = found or _NUMBER.findall(text)
    if not found:
        return None
    try:
        return str(Fraction(found[-1].replace(",", "")))
    except (ValueError, ZeroDivisionError):
        return None
