"""Draws the facts of problems, and a valid answer to each."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence

from partsong.evals.parallelbench.task import Facts

__all__ = ["FIRST_NAMES", "LAST_NAMES", "draw_answer", "draw_facts", "verb_of"]

FIRST_NAMES = (
    *("Ada", "Boris", "Clara", "Daniel", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karen", "Liam"),
    *("Maria", "Nils", "Olga", "Peter", "Rosa", "Simon", "Tessa", "Victor"),
)
LAST_NAMES = (
    *("Arnold", "Barker", "Cooper", "Dalton", "Egan", "Fisher", "Grant", "Harper", "Irwin", "Jensen", "Keller"),
    *("Lambert", "Mercer", "Norton", "Owens", "Parker", "Quinn", "Ramsey", "Sutton", "Turner"),
)
_SYMBOLS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
_NAMES = tuple(f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES)
#: Empty cells of a 4 x 4 sudoku.
_HOLES = 8


def verb_of(name: str) -> str:
    """Returns the operation of a task, which is its name without the length of the line."""
    return name.removesuffix("_n15")


def draw_facts(name: str, size: int, rng: random.Random) -> Facts:
    """Draws the facts of a problem.

    Args:
        name: of the task.
        size: of the problem.
        rng: source of the draws.
    """
    match verb_of(name):
        case "cumsum":
            return Facts(numbers=tuple(rng.randint(1, 9) for _ in range(size)))
        case "math_op":
            return _operation(size, rng)
        case "domino":
            return Facts(count=size, numbers=(10 * rng.randint(1, 9) + rng.randint(1, 9),))
        case "latin_square":
            return Facts(items=tuple(rng.sample(_SYMBOLS, size)))
        case "sudoku":
            return _sudoku(rng)
        case "repeat":
            return Facts(items=tuple(rng.sample(_NAMES, size)), count=rng.randint(2, 3) if size < 5 else 2)
        case verb:
            return _line(verb, size, rng)


def _line(verb: str, size: int, rng: random.Random) -> Facts:
    *items, other = rng.sample(_NAMES, size + 1)
    action, _, where = verb.partition("_")
    places = size + (action == "insert")
    return Facts(
        items=tuple(items),
        word=other if action in ("insert", "replace") else "",
        place=rng.randint(1, places) if where == "index" else None,
    )


def _operation(digits: int, rng: random.Random) -> Facts:
    """Draws two numbers whose sum, difference or product has about `digits` digits."""
    sign = rng.choice("+-*")
    sides = (digits // 2, digits - digits // 2) if sign == "*" else (digits - 1, digits - 1)
    return Facts(sign=sign, numbers=tuple(rng.randint(10 ** (n - 1), 10**n - 1) for n in sides))


def _sudoku(rng: random.Random) -> Facts:
    """Draws a square with holes that can be filled in one way only."""
    grid = rng.choice(grids())
    for _ in range(1000):
        holes = set(rng.sample(range(16), _HOLES))
        clues = tuple(0 if cell in holes else value for cell, value in enumerate(grid))
        if len(solutions(clues)) == 1:
            return Facts(clues=clues)
    raise AssertionError("no set of holes with one solution in 1000 draws")


@functools.cache
def grids() -> tuple[tuple[int, ...], ...]:
    """Returns all 288 filled 4 x 4 sudokus, line by line."""
    halves = [rows for rows in itertools.product(itertools.permutations(range(1, 5)), repeat=2) if _boxes_differ(rows)]
    return tuple(
        tuple(itertools.chain(*above, *below))
        for above, below in itertools.product(halves, repeat=2)
        if all(len({row[c] for row in (*above, *below)}) == 4 for c in range(4))
    )


def _boxes_differ(rows: Sequence[Sequence[int]]) -> bool:
    return all(len({row[c] for row in rows for c in box}) == 4 for box in ((0, 1), (2, 3)))


def solutions(clues: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns every way to fill the empty cells."""
    return [grid for grid in grids() if all(clue in (0, value) for clue, value in zip(clues, grid, strict=True))]


# --- answers ----------------------------------------------------------------------------------------------------------


def draw_answer(name: str, facts: Facts, rng: random.Random) -> str:
    """Draws a valid answer, written as the question asks."""
    verb = verb_of(name)
    special: dict[str, Callable[[], str]] = {
        "cumsum": lambda: f"[{', '.join(map(str, itertools.accumulate(facts.numbers)))}]",
        "math_op": lambda: str(operation_result(facts)),
        "domino": lambda: f"[{', '.join(map(str, _dominoes(facts, rng)))}]",
        "latin_square": lambda: "\n".join(",".join(row) for row in _square(facts.items, rng)),
        "sudoku": lambda: written_grid(solutions(facts.clues)[0]),
    }
    if verb in special:
        return special[verb]()
    return written_list(_shuffled(facts.items, rng) if verb == "shuffle" else rng.choice(valid_lines(verb, facts)))


def valid_lines(verb: str, facts: Facts) -> list[tuple[str, ...]]:
    """Returns every valid line after an operation, except for a shuffle, which has too many."""
    items = facts.items
    action, _, where = verb.partition("_")
    if action in ("insert", "remove", "replace"):
        last = len(items) + (action == "insert")
        places = range(last) if where == "random" else [(facts.place or 0) - 1]
        new = () if action == "remove" else (facts.word,)
        return [(*items[:at], *new, *items[at + (action != "insert") :]) for at in places]
    one: dict[str, Sequence[str]] = {
        "copy": items,
        "reverse": items[::-1],
        "sort": sorted(items),
        "repeat": [item for item in items for _ in range(facts.count)],
    }
    return [tuple(one[action])]


def operation_result(facts: Facts) -> int:
    """Returns the result of an operation on two numbers."""
    left, right = facts.numbers
    return {"+": left + right, "-": left - right, "*": left * right}[facts.sign]


def written_list(items: Sequence[str]) -> str:
    """Writes a list as in questions and answers."""
    return "[" + ", ".join(f'"{item}"' for item in items) + "]"


def written_grid(cells: Sequence[int]) -> str:
    """Writes a 4 x 4 square of digits line by line, with `_` for an empty cell."""
    return "\n".join("".join(str(cell or "_") for cell in cells[low : low + 4]) for low in range(0, 16, 4))


def _shuffled(items: Sequence[str], rng: random.Random) -> list[str]:
    while True:
        order = rng.sample(items, len(items))
        if order != list(items):
            return order


def _dominoes(facts: Facts, rng: random.Random) -> list[int]:
    chain = [facts.numbers[0]]
    while len(chain) < facts.count:
        chain.append(10 * (chain[-1] % 10) + rng.randint(1, 9))
    return chain


def _square(symbols: Sequence[str], rng: random.Random) -> list[list[str]]:
    """Draws a Latin square by shifting the symbols from line to line and shuffling lines, columns and symbols."""
    size = len(symbols)
    names, rows, columns = (rng.sample(range(size), size) for _ in range(3))
    return [[symbols[names[(row + column) % size]] for column in columns] for row in rows]
