"""Draws lists of numbers and operations on them, one after another."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Annotated

from partsong.evals.reasoning.judges import is_list
from partsong.evals.reasoning.problem import NumProblems, Problem
from partsong.knobs import Whole, check_knobs, type_hints
from partsong.reasoning.answers.extract_rows import final_list
from partsong.seeds import derive

__all__ = ["OPERATIONS", "problems"]

#: Operations on a list, each with its words in the question; ``{k}`` is a number drawn for the step.
OPERATIONS: dict[str, tuple[str, Callable[[list[int], int], list[int]]]] = {
    "sort": ("sort it in ascending order", lambda items, k: sorted(items)),
    "reverse": ("reverse it", lambda items, k: items[::-1]),
    "add": ("add {k} to every number", lambda items, k: [item + k for item in items]),
    "double": ("double every number", lambda items, k: [2 * item for item in items]),
    "rotate": ("move its first {k} numbers to the end, in the same order", lambda items, k: items[k:] + items[:k]),
    "swap": ("swap the first and the last number", lambda items, k: [items[-1], *items[1:-1], items[0]]),
    "sums": ("replace every number by the sum of all numbers up to and including it", lambda items, k: _sums(items)),
    "even": ("move all even numbers behind the odd ones, keeping their order", lambda items, k: _odd_first(items)),
}


def problems(
    num: NumProblems,
    seed: int = 0,
    *,
    length: Annotated[int, Whole(3, 40)] = 6,
    steps: Annotated[int, Whole(1, 8)] = 2,
    largest: Annotated[int, Whole(1, 1000)] = 20,
) -> list[Problem]:
    """Draws lists and operations on them.

    Args:
        num: how many.
        seed: problem i depends on the seed, i and the knobs, but not on `num`.
        length: of the list.
        steps: how many operations; no two in a row are the same.
        largest: of the numbers.

    Returns:
        The problems, with ``items`` and ``operations`` in their ``facts``; an operation is a name and a number.

    Raises:
        ArgumentError: a knob is outside its range.

    >>> problems(1, seed=3)[0].gold[0]
    '['
    """
    check_knobs(type_hints(problems), {"num": num, "length": length, "steps": steps, "largest": largest})
    return [_problem(number, seed, length, steps, largest) for number in range(num)]


def _problem(number: int, seed: int, length: int, steps: int, largest: int) -> Problem:
    rng = random.Random(derive(seed, "list_operations", length, steps, largest, number))
    items = [rng.randint(1, largest) for _ in range(length)]
    names: list[str] = []
    while len(names) < steps:
        names.append(rng.choice([name for name in OPERATIONS if name not in names[-1:]]))
    chosen = [(name, rng.randint(1, length - 1)) for name in names]
    result, words = items, []
    for name, k in chosen:
        order, operation = OPERATIONS[name]
        result = operation(result, k)
        words.append(order.format(k=k))
    gold = f"[{', '.join(map(str, result))}]"
    return Problem(
        task="list_operations",
        number=number,
        question=(
            f"Take the list [{', '.join(map(str, items))}]. {_sentence(words)} End with the resulting list in square "
            "brackets."
        ),
        gold=gold,
        check=partial(is_list, gold=gold),
        extract=final_list,
        facts={"items": tuple(items), "operations": tuple(chosen)},
    )


def _sentence(words: list[str]) -> str:
    first, *rest = words
    return " ".join([f"First, {first}.", *(f"Then {one}." for one in rest)])


def _sums(items: list[int]) -> list[int]:
    return [sum(items[: place + 1]) for place in range(len(items))]


def _odd_first(items: list[int]) -> list[int]:
    return [item for item in items if item % 2] + [item for item in items if item % 2 == 0]
