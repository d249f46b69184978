"""Draws problems of tasks from seeds; no data is needed, and no two seeds give the same questions.

>>> TASKS["multiplication"](2, seed=1, digits=2)[1].name
'multiplication/1'
"""

from __future__ import annotations

from collections.abc import Callable

from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.tasks import countdown, list_operations, multiplication, sudoku, word_problems

__all__ = ["TASKS"]

#: Functions ``(num, seed, **knobs)`` that draw problems, by the name of the task.
TASKS: dict[str, Callable[..., list[Problem]]] = {
    "countdown": countdown.problems,
    "sudoku": sudoku.problems,
    "word_problems": word_problems.problems,
    "multiplication": multiplication.problems,
    "list_operations": list_operations.problems,
}
