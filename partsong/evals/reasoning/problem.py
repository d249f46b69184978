"""Defines a problem: a question, its gold answer, and how an answer is found in a text and judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from partsong.knobs import Whole
from partsong.reasoning.calls.answer import Extract

__all__ = ["Check", "NumProblems", "Problem"]

#: Says whether an answer, as `Problem.extract` finds it, is right; None stands for no answer.
Check = Callable[[str | None], bool]
#: How many problems to draw.
NumProblems = Annotated[int, Whole(0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Holds a question and how its answers are judged.

    Attributes:
        task: the name of its task.
        number: which of the task's problems it is.
        question: the whole prompt.
        gold: a right answer, as `extract` would find it; there may be others.
        check: judges answers.
        extract: finds the answer in a text.
        facts: the data of the question, such as the numbers of a countdown.
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
        """Returns a name that is unique among all problems."""
        return f"{self.task}/{self.number}"
