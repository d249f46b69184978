"""Draws multiplications of two numbers."""

from __future__ import annotations

import random
from functools import partial
from typing import Annotated

from partsong.evals.reasoning.judges import is_number
from partsong.evals.reasoning.problem import NumProblems, Problem
from partsong.knobs import Whole, check_knobs, type_hints
from partsong.reasoning.answers.extract import final_number
from partsong.seeds import derive

__all__ = ["problems"]

#: How many digits a factor may have.
Digits = Annotated[int, Whole(1, 30)]


def problems(
    num: NumProblems, seed: int = 0, *, digits: Digits = 3, other_digits: Digits | None = None
) -> list[Problem]:
    """Draws multiplications.

    Args:
        num: how many.
        seed: problem i depends on the seed, i and the knobs, but not on `num`.
        digits: of the first factor.
        other_digits: of the second; None is the same number.

    Returns:
        The problems, with ``factors`` in their ``facts``.

    Raises:
        ArgumentError: a knob is outside its range.

    >>> problems(1, seed=3, digits=1)[0].question.startswith("How much is ")
    True
    """
    check_knobs(type_hints(problems), {"num": num, "digits": digits, "other_digits": other_digits})
    sizes = digits, digits if other_digits is None else other_digits
    return [_problem(number, seed, sizes) for number in range(num)]


def _problem(number: int, seed: int, sizes: tuple[int, int]) -> Problem:
    rng = random.Random(derive(seed, "multiplication", *sizes, number))
    left, right = (rng.randint(10 ** (size - 1), 10**size - 1) for size in sizes)
    return Problem(
        task="multiplication",
        number=number,
        question=f"How much is {left} * {right}? Work it out in steps and end with the product.",
        gold=str(left * right),
        check=partial(is_number, gold=str(left * right)),
        extract=final_number,
        facts={"factors": (left, right)},
    )
