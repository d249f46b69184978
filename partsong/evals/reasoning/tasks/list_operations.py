"""Operations on a list of numbers, one after another."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from partsong.evals.reasoning.judges import is_list
from partsong.evals.reasoning.problem import Problem, check_num, knob
from partsong.reasoning.answers.extract_rows import final_list
from partsong.seeds import derive

__all__ = ["OPERATIONS", "problems"]

#: What can be done to a list, and the words for it; ``{k}`` is a number drawn for the step.
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


def problems(num: int, seed: int = 0, *, length: int = 6, steps: int = 2, largest: int = 20) -> list[Problem]:
    """Draws lists and what is to be done to them.

    Args:
        num: how many.
        seed: problem i is a function of (seed, i) and the knobs, whatever `num` is.
        length: of the list, 3 to 40.
        steps: operations, 1 to 8, no two equal ones in a row.
        largest: of the numbers, 1 to 1000.

    Returns:
        The problems; ``facts``: ``items`` and ``operations``, pairs of a name out of `OPERATIONS` and its number.

    Raises:
        ArgumentError: a knob outside its range.

    >>> problems(1, seed=3)[0].gold[0]
    '['
    """
    for name, value, low, high in (("length", length, 3, 40), ("steps", steps, 1, 8), ("largest", largest, 1, 1000)):
        knob(name, value, low, high)
    return [_problem(number, seed, length, steps, largest) for number in range(check_num(num))]


def _problem(number: int, seed: int, length: int, steps: int, largest: int) -> Problem:
    rng = random.Random(derive(seed, "list_operations", length, steps, largest, number))
    items = [rng.randint(1, largest) for _ in range(length)]
    names: list[str] = []
    while len(names) < steps:
        names.append(rng.choice([name for name in OPERATIONS if name not in names[-1:]]))
    chosen = [(name, rng.randint(1, length - 1)) for name in names]
    result, words = items, []
    for name, k in chosen:
        said, done = OPERATIONS[name]
        result = done(result, k)
        words.append(said.format(k=k))
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
