"""Draws sudokus of three sizes, each with one solution."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Annotated

from partsong.errors import ArgumentError
from partsong.evals.reasoning.problem import NumProblems, Problem
from partsong.evals.reasoning.tasks.sudoku_solver import BOXES, solve
from partsong.knobs import Whole, check_knobs, check_value, type_hints
from partsong.reasoning.answers.extract_rows import final_grid
from partsong.seeds import derive

__all__ = ["is_solved", "problems"]

#: The default number of empty cells, by size.
_HOLES = {4: 8, 6: 16, 9: 40}


def problems(num: NumProblems, seed: int = 0, *, size: int = 4, holes: int | None = None) -> list[Problem]:
    """Draws sudokus.

    Args:
        num: how many.
        seed: problem i depends on the seed, i and the knobs, but not on `num`.
        size: 4, 6 (with boxes of 2 x 3) or 9.
        holes: at most this many empty cells; None is 8, 16 or 40. A cell stays if the solution depends on it.

    Returns:
        The problems, with ``size`` and ``clues`` (line by line, 0 for an empty cell) in their ``facts``.

    Raises:
        ArgumentError: the size is another one, or there are more holes than cells.

    >>> problem = problems(1, seed=3)[0]
    >>> problem.check(problem.gold)
    True
    """
    if size not in BOXES:
        raise ArgumentError(f"size={size!r}; use {', '.join(map(str, BOXES))}")
    holes = _HOLES[size] if holes is None else holes
    check_value("holes", holes, Annotated[int, Whole(1, size * size)])
    check_knobs(type_hints(problems), {"num": num})
    return [_problem(number, seed, size, holes) for number in range(num)]


def _problem(number: int, seed: int, size: int, holes: int) -> Problem:
    rng = random.Random(derive(seed, "sudoku", size, holes, number))
    (grid,) = solve([0] * size * size, size, most=1, rng=rng)
    clues = _dig(list(grid), size, holes, rng)
    height, width = BOXES[size]
    return Problem(
        task="sudoku",
        number=number,
        question=(
            f"Fill the empty cells, marked _, of this {size} x {size} sudoku. Every row, every column and every box of "
            f"{height} rows and {width} columns holds each of the digits 1 to {size} once. End with the {size} rows of "
            f"the full square, one on a line, digits only.\n\n{_written(clues, size)}"
        ),
        gold=_written(grid, size),
        check=partial(is_solved, clues=tuple(clues), size=size),
        extract=partial(final_grid, rows=size),
        facts={"clues": tuple(clues), "size": size},
    )


def _dig(cells: list[int], size: int, holes: int, rng: random.Random) -> list[int]:
    """Empties cells in random order, except those that would allow a second solution."""
    for place in rng.sample(range(size * size), size * size):
        if cells.count(0) == holes:
            break
        kept, cells[place] = cells[place], 0
        if len(solve(cells, size, most=2)) > 1:
            cells[place] = kept
    return cells


def _written(cells: Sequence[int], size: int) -> str:
    return "\n".join("".join(str(c or "_") for c in cells[low : low + size]) for low in range(0, size * size, size))


def is_solved(answer: str | None, *, clues: tuple[int, ...], size: int) -> bool:
    r"""Says whether a square follows the rules and keeps the clues.

    Args:
        answer: the lines of the square, digits only.
        clues: line by line, 0 for an empty cell.
        size: 4, 6 or 9.

    >>> is_solved("1234\n3412\n2143\n4321", clues=(1,) + 15 * (0,), size=4)
    True
    """
    lines = [] if answer is None else answer.split("\n")
    digits = "123456789"[:size]
    if len(lines) != size or any(len(line) != size or set(line) - set(digits) for line in lines):
        return False
    grid = [[int(cell) for cell in line] for line in lines]
    height, width = BOXES[size]
    units = [*grid, *map(list, zip(*grid, strict=True))]
    units += [
        [grid[top + row][left + column] for row in range(height) for column in range(width)]
        for top in range(0, size, height)
        for left in range(0, size, width)
    ]
    kept = all(clue in (0, grid[place // size][place % size]) for place, clue in enumerate(clues))
    return kept and all(len(set(unit)) == size for unit in units)
