"""Draws countdowns and sudokus, each with a direct answer and with a search that leads to one, and judges answers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from partsong.evals.reasoning.tasks.sudoku import problems
from partsong.knobs import Whole, check_value
from partsong.seeds import derive
from partsong_zoo.search import sudokus
from partsong_zoo.sums import problems as sums
from partsong_zoo.sums import solutions

__all__ = ["TASKS", "SearchProblem", "SearchTask", "countdown", "sudoku"]

#: How many numbers a countdown has.
NUMBERS = 3


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """Holds a problem and what two models should write.

    Attributes:
        question: the prompt.
        direct: an answer.
        search: a depth-first search with its dead ends, and the answer it comes to.
    """

    question: str
    direct: str
    search: str


@dataclass(frozen=True, slots=True)
class SearchTask:
    """Holds a task.

    Attributes:
        draw: draws a problem, from a random generator and whether it is `fresh`, so kept from training.
        answer_of: finds the answer to a question in a text; None if there is none.
        is_right: judges a text that answers a question.
        most: the most tokens that a text may have.
    """

    draw: Callable[..., SearchProblem]
    answer_of: Callable[[str, str], str | None]
    is_right: Callable[[str, str], bool]
    most: int

    def fresh(self, num: Annotated[int, Whole(0)], seed: int) -> list[SearchProblem]:
        """Draws problems that training never shows; problem i depends on the seed and i, but not on `num`."""
        check_value("num", num, Annotated[int, Whole(0)])
        return [self.draw(random.Random(derive(seed, "search", number)), fresh=True) for number in range(num)]


def countdown(rng: random.Random, *, fresh: bool) -> SearchProblem:
    """Draws a countdown of three numbers. The direct answer has the steps of any solution.

    >>> countdown(random.Random(1), fresh=True).question
    'make 69 from 2 11 12'
    """
    example = solutions.draw("countdown", rng, fresh=fresh, sizes=(NUMBERS,))
    return SearchProblem(example.question, example.solution, solutions.searched(sums.parse(example.question)))


def sudoku(rng: random.Random, *, fresh: bool, size: int, holes: int, longest: int) -> SearchProblem:
    """Draws a sudoku.

    Args:
        rng: where the draws come from.
        fresh: whether it is one that is kept from training.
        size: 4 or 6.
        holes: how many cells are empty, or as many as leave one solution.
        longest: the most words of a search; a sudoku that takes more is drawn anew.
    """
    while True:
        (one,) = problems(1, rng.getrandbits(62), size=size, holes=holes)
        clues, solution = one.facts["clues"], map(int, one.gold.replace("\n", ""))
        question, search = sudokus.written(clues), sudokus.searched(clues, rng)
        # A cell is one word of two characters.
        words = len(search) - sum(map(str.isalpha, search))
        # One in 16 is kept from training, by a hash.
        held_out = hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % 16 == 0
        if held_out == fresh and words <= longest:
            answer = sudokus.written([0 if clue else digit for clue, digit in zip(clues, solution, strict=True)])
            return SearchProblem(question, answer, search)


def _sudokus(size: int, holes: int, longest: int) -> SearchTask:
    return SearchTask(
        draw=partial(sudoku, size=size, holes=holes, longest=longest),
        answer_of=partial(sudokus.answer_of, size=size),
        is_right=partial(sudokus.is_right, size=size),
        most=longest + 100,
    )


#: All tasks, by name.
TASKS = {
    "countdown": SearchTask(
        draw=countdown, answer_of=lambda _, text: sums.answer_of(text), is_right=sums.check, most=330
    ),
    "sudoku-4": _sudokus(4, 12, 250),
    "sudoku-6": _sudokus(6, 20, 500),
}
