"""Draws countdowns and sudokus, each with a direct answer and with a search that leads to one, and judges answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from partsong.evals.reasoning.tasks.sudoku import problems
from partsong.knobs import Whole, check_knobs, type_hints
from partsong.seeds import derive
from partsong_zoo.search import sudokus
from partsong_zoo.sums import problems as sums
from partsong_zoo.sums.solutions import draw, searched

__all__ = ["TASKS", "SearchProblem", "SearchTask", "countdown", "sudoku"]

#: How many numbers a countdown has, and how many cells of a sudoku are empty at most.
NUMBERS, HOLES = 3, 28
#: How many sudokus training moves about by symmetries, of which there are 2.5 million.
POOL = 4000


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
        training: makes a function that draws problems for training, from a seed of them all.
        fresh: draws problems that training never shows, by how many and a seed.
        answer_of: finds the answer to a question in a text; None if there is none.
        is_right: judges a text that answers a question.
        most: the most tokens that a text may have.
    """

    training: Callable[[int], Callable[[random.Random], SearchProblem]]
    fresh: Callable[[int, int], list[SearchProblem]]
    answer_of: Callable[[str, str], str | None]
    is_right: Callable[[str, str], bool]
    most: int


def countdown(rng: random.Random, *, fresh: bool) -> SearchProblem:
    """Draws a countdown of three numbers. The direct answer has the steps of any solution.

    >>> countdown(random.Random(1), fresh=True).question
    'make 69 from 2 11 12'
    """
    example = draw("countdown", rng, fresh=fresh, sizes=(NUMBERS,))
    return SearchProblem(example.question, example.solution, searched(sums.parse(example.question)))


def sudoku(num: Annotated[int, Whole(0)], seed: int) -> list[SearchProblem]:
    """Draws sudokus of 6 x 6 cells of which none can be emptied further, or 28 are empty.

    Args:
        num: how many.
        seed: sudoku i depends on the seed and i, but not on `num`.
    """
    check_knobs(type_hints(sudoku), {"num": num})
    drawn = problems(num, seed, size=sudokus.SIZE, holes=HOLES)
    return [_sudoku(one.facts["clues"], one.gold, random.Random(derive(seed, one.number))) for one in drawn]


def _sudoku(clues: tuple[int, ...], gold: str, rng: random.Random) -> SearchProblem:
    answer = [0 if clue else int(digit) for clue, digit in zip(clues, gold.replace("\n", ""), strict=True)]
    return SearchProblem(sudokus.written(clues), sudokus.written(answer), sudokus.searched(clues, rng))


def _moved(one: SearchProblem, rng: random.Random) -> SearchProblem:
    """Moves a sudoku by a symmetry; clues and answers are in order again."""
    question, direct, search = sudokus.moved([one.question, one.direct, one.search], rng)
    empty = [0] * sudokus.SIZE**2
    return SearchProblem(
        *(sudokus.written(sudokus.follow(empty, text) or empty) for text in (question, direct)), search
    )


def _training_sudokus(seed: int) -> Callable[[random.Random], SearchProblem]:
    pool = sudoku(POOL, derive(seed, "training sudokus"))
    return lambda rng: _moved(rng.choice(pool), rng)


#: Both tasks, by name.
TASKS = {
    "countdown": SearchTask(
        training=lambda _: lambda rng: countdown(rng, fresh=False),
        fresh=lambda num, seed: [countdown(random.Random(derive(seed, "search", i)), fresh=True) for i in range(num)],
        answer_of=lambda _, text: sums.answer_of(text),
        is_right=sums.check,
        most=330,
    ),
    "sudoku": SearchTask(
        training=_training_sudokus,
        fresh=sudoku,
        answer_of=sudokus.answer_of,
        is_right=sudokus.is_right,
        most=330,
    ),
}
