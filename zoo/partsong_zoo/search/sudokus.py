"""Writes sudokus of 4 x 4 or 6 x 6 cells as text: clues, answers and depth-first searches with their dead ends.

`a13` is a 3 in the first cell of row a. Cells are words, and so are digits.
"""

from __future__ import annotations

import functools
import math
import operator
import random
import re
from collections.abc import Sequence

from partsong.evals.reasoning.tasks.sudoku import is_solved
from partsong.evals.reasoning.tasks.sudoku_solver import BOXES

__all__ = ["GUESS", "STUCK", "UNDO", "answer_of", "cell_words", "follow", "is_right", "searched", "written"]

#: Stands between a cell and a digit that is one of several, at a dead end, and before a cell that is emptied again.
GUESS, STUCK, UNDO = "?", "!", "-"
_MOVE = re.compile(r"(-?)([a-f][1-6])(?:\??([1-6]))?|!")


@functools.cache
def cell_words(size: int) -> tuple[str, ...]:
    """Returns the words for the cells of a square, line by line.

    >>> cell_words(4)[4]
    'b1'
    """
    return tuple(f"{row}{column + 1}" for row in "abcdef"[:size] for column in range(size))


def written(cells: Sequence[int]) -> str:
    """Writes the digits of some cells in order.

    Args:
        cells: digits line by line, 0 where nothing is written.

    >>> written([0, 4, *14 * [0]])
    'a24'
    """
    names = cell_words(math.isqrt(len(cells)))
    return "".join(f"{names[place]}{digit}" for place, digit in enumerate(cells) if digit)


def follow(clues: Sequence[int], text: str) -> list[int] | None:
    """Fills a square as a text says; None if the text cannot be read, or fills a full cell or empties another one.

    Args:
        clues: digits line by line, 0 for an empty cell.
        text: an answer or a search.

    Returns:
        Digits line by line, 0 for a cell that is still empty.

    >>> follow([0] * 16, "a24b1?3-b1")[:5]
    [0, 4, 0, 0, 0]
    """
    cells, end, names = list(clues), 0, cell_words(math.isqrt(len(clues)))
    for move in _MOVE.finditer(text):
        back, cell, digit = move.groups()
        if move.start() != end:
            return None
        end = move.end()
        if cell is None:
            continue
        if cell not in names:
            return None
        place = names.index(cell)
        if bool(back) == bool(digit) or clues[place] or bool(cells[place]) != bool(back):
            return None
        cells[place] = int(digit or 0)
    return cells if end == len(text) else None


def answer_of(question: str, text: str, *, size: int) -> str | None:
    """Finds the full square that a text ends with, a line for each row; None if there is none.

    >>> answer_of("a13", "a14", size=4)
    """
    clues = follow([0] * size * size, question)
    cells = clues and follow(clues, text)
    if not cells or 0 in cells:
        return None
    return "\n".join("".join(map(str, cells[low : low + size])) for low in range(0, size * size, size))


def is_right(question: str, text: str, *, size: int) -> bool:
    """Says whether the square that a text ends with is full and follows the rules.

    >>> is_right("a13", "a14", size=4)
    False
    """
    clues = follow([0] * size * size, question) or ()
    return is_solved(answer_of(question, text, size=size), clues=tuple(clues), size=size)


def searched(clues: Sequence[int], rng: random.Random) -> str:
    """Writes a depth-first search for the solution, which goes through the empty cells line by line.

    A digit is a guess (`?`) if another possible one is left to be tried in its cell. At a dead end (`!`), where the
    next cell has no possible digit, all cells since the last guess are emptied (`-`), the last one first, and the
    guessed one with them.

    Args:
        clues: digits line by line, 0 for an empty cell.
        rng: gives the order of a cell's digits.
    """
    words: list[str] = []
    _search(list(clues), rng, words)
    return "".join(words)


def _search(cells: list[int], rng: random.Random, words: list[str]) -> bool:
    if 0 not in cells:
        return True
    size, place = math.isqrt(len(cells)), cells.index(0)
    name, taken = cell_words(size)[place], {cells[peer] for peer in _peers(size)[place]}
    digits = [digit for digit in range(1, size + 1) if digit not in taken]
    if not digits:
        words.append(STUCK)
    for digit in rng.sample(digits, len(digits)):
        digits.remove(digit)
        words.append(f"{name}{GUESS if digits else ''}{digit}")
        cells[place] = digit
        if _search(cells, rng, words):
            return True
        cells[place] = 0
        words.append(UNDO + name)
    return False


@functools.cache
def _peers(size: int) -> tuple[tuple[int, ...], ...]:
    """Returns for each cell the others of its row, column and box."""
    height, width = BOXES[size]
    units = [(p // size, p % size, (p // size // height, p % size // width)) for p in range(size * size)]
    return tuple(
        tuple(p for p, other in enumerate(units) if p != place and any(map(operator.eq, unit, other)))
        for place, unit in enumerate(units)
    )
