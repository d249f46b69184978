"""Defines two tasks that can be answered directly, or by a search that is written out with its dead ends.

`SearchTask` draws problems and judges answers; `countdown` and `sudoku` are the two.
"""

from partsong_zoo.search.problems import TASKS, SearchProblem, SearchTask, countdown, sudoku

__all__ = ["TASKS", "SearchProblem", "SearchTask", "countdown", "sudoku"]
