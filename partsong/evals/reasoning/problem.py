"""What a problem is: a question, its gold answer, how an answer is found in a text, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.errors import ArgumentError
from partsong.reasoning.calls.answer import Extract

__all__ = ["Check", "Problem", "check_num", "knob"]

#: Whether an answer, as `Problem.extract` finds it, is right; None is no answer.
Check = Callable[[str | None], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A question.

    Attributes:
        task: the name of its task.
        number: which of the task's problems; with the task, it names the problem.
        question: the whole prompt.
        gold: a right answer, as `extract` would find it; there may be others.
        check: judges answers.
        extract: finds the answer in a text.
        facts: what it was made of, such as the numbers of a countdown.
    """

    task: str
    number: int
    question: str
    gold: str
    check: Check
    extract: Extract
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Names it among all problems."""
        return f"{self.task}/{self.number}"


def check_num(num: int) -> int:
    """Refuses a number of problems that is none.

    Raises:
        ArgumentError: it is no integer from 0.
    """
    if isinstance(num, bool) or not isinstance(num, int) or num < 0:
        raise ArgumentError(f"num={num!r}; use an integer from 0")
    return num


def knob(name: str, value: int, low: int, high: int) -> int:
    """Refuses a knob outside its range.

    Raises:
        ArgumentError: it is no integer from `low` to `high`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ArgumentError(f"{name}={value!r}; use an integer from {low} to {high}")
    return value
