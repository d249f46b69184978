"""Multiplication of two numbers of so many digits."""

from __future__ import annotations

import random
from functools import partial

from partsong.evals.reasoning.judges import is_number
from partsong.evals.reasoning.problem import Problem, check_num, knob
from partsong.reasoning.answers.extract import final_number
from partsong.seeds import derive

__all__ = ["problems"]


def problems(num: int, seed: int = 0, *, digits: int = 3, other_digits: int | None = None) -> list[Problem]:
    """Draws multiplications.

    Args:
        num: how many.
        seed: problem i is a function of (seed, i) and the knobs, whatever `num` is.
        digits: of the first factor, 1 to 30.
        other_digits: of the second. Default: as many.

    Returns:
        The problems; ``facts``: ``factors``.

    Raises:
        ArgumentError: a knob outside its range.

    >>> problems(1, seed=3, digits=1)[0].question.startswith("How much is ")
    True
    """
    sizes = knob("digits", digits, 1, 30), knob("other_digits", digits if other_digits is None else other_digits, 1, 30)
    return [_problem(number, seed, sizes) for number in range(check_num(num))]


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
