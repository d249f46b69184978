"""Solves sudokus by trying first the cell with the fewest digits left; sets of digits are bits of an integer."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

__all__ = ["BOXES", "solve"]

#: Rows and columns of a box, by the size of the square.
BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}


def solve(clues: Sequence[int], size: int, *, most: int = 2, rng: random.Random | None = None) -> list[tuple[int, ...]]:
    """Finds ways to fill a square.

    Args:
        clues: cells line by line, 0 for an empty one.
        size: one of `BOXES`.
        most: how many ways to find before stopping.
        rng: gives the order in which digits are tried; None is ascending.

    Returns:
        Full squares, line by line; an empty list if the clues contradict each other.

    >>> solve([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 0], 4)
    [(1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1)]
    """
    cells, used = list(clues), [0] * (3 * size)
    units = _units(size)
    for place, clue in enumerate(cells):
        if clue and any(used[unit] >> clue & 1 for unit in units[place]):
            return []
        for unit in units[place]:
            used[unit] |= bool(clue) << clue
    solutions: list[tuple[int, ...]] = []
    _fill(cells, [place for place, clue in enumerate(cells) if not clue], used, size, most, rng, solutions)
    return solutions


def _fill(
    cells: list[int],
    empty: list[int],
    used: list[int],
    size: int,
    most: int,
    rng: random.Random | None,
    solutions: list[tuple[int, ...]],
) -> None:
    if not empty:
        solutions.append(tuple(cells))
        return
    units, full = _units(size), (1 << size + 1) - 2
    free = {place: full & ~(used[a] | used[b] | used[c]) for place in empty for a, b, c in [units[place]]}
    place = min(empty, key=lambda cell: free[cell].bit_count())
    digits = [digit for digit in range(1, size + 1) if free[place] >> digit & 1]
    if rng is not None:
        rng.shuffle(digits)
    rest = [cell for cell in empty if cell != place]
    for digit in digits:
        cells[place] = digit
        for unit in units[place]:
            used[unit] ^= 1 << digit
        _fill(cells, rest, used, size, most, rng, solutions)
        for unit in units[place]:
            used[unit] ^= 1 << digit
        if len(solutions) >= most:
            break
    cells[place] = 0


@functools.cache
def _units(size: int) -> tuple[tuple[int, int, int], ...]:
    """Returns for each cell the numbers of its row, its column and its box."""
    height, width = BOXES[size]
    across = size // width
    return tuple(
        (row, size + column, 2 * size + row // height * across + column // width)
        for row in range(size)
        for column in range(size)
    )
