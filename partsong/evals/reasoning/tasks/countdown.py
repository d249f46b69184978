"""Draws countdowns: reach a target with some numbers, each used once, and the four operations."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from functools import partial
from typing import Annotated

from partsong.evals.reasoning.problem import NumProblems, Problem
from partsong.knobs import Whole, check_knobs, type_hints
from partsong.reasoning.answers.arithmetic import read_arithmetic
from partsong.reasoning.answers.expression import ExpressionError
from partsong.reasoning.answers.extract import final_expression
from partsong.seeds import derive

__all__ = ["problems", "reaches"]


def problems(
    num: NumProblems,
    seed: int = 0,
    *,
    count: Annotated[int, Whole(2, 8)] = 4,
    largest: Annotated[int, Whole(2, 1000)] = 25,
    target: Annotated[int, Whole(10, 10_000)] = 100,
    use_all: bool = True,
) -> list[Problem]:
    """Draws countdowns, each of which has a solution that uses every number.

    Args:
        num: how many.
        seed: problem i depends on the seed, i and the knobs, but not on `num`.
        count: how many numbers each has.
        largest: of the numbers.
        target: the largest target.
        use_all: whether a right answer must use every number.

    Returns:
        The problems, with ``numbers`` and ``target`` in their ``facts``.

    Raises:
        ArgumentError: a knob is outside its range.

    >>> problem = problems(1, seed=3)[0]
    >>> problem.check(problem.gold)
    True
    """
    check_knobs(type_hints(problems), {"num": num, "count": count, "largest": largest, "target": target})
    return [_problem(number, seed, count, largest, target, use_all) for number in range(num)]


def _problem(number: int, seed: int, count: int, largest: int, target: int, use_all: bool) -> Problem:
    rng = random.Random(derive(seed, "countdown", count, largest, target, number))
    while True:
        numbers = [rng.randint(1, largest) for _ in range(count)]
        expression, value = _combined([(str(n), Fraction(n)) for n in numbers], rng)
        if value.denominator == 1 and 1 <= value <= target and value not in numbers:
            break
    goal, how = int(value), "each of them exactly once" if use_all else "each of them at most once"
    return Problem(
        task="countdown",
        number=number,
        question=(
            f"Reach {goal} from the numbers {', '.join(map(str, numbers))}. Use {how}, and only +, -, *, / and "
            "brackets. End with a line that holds one expression and nothing else, such as (1 + 2) * 3."
        ),
        gold=read_arithmetic(expression).canonical(),
        check=partial(reaches, numbers=tuple(numbers), target=goal, use_all=use_all),
        extract=final_expression,
        facts={"numbers": tuple(numbers), "target": goal},
    )


def _combined(parts: list[tuple[str, Fraction]], rng: random.Random) -> tuple[str, Fraction]:
    """Joins two parts at a time until one is left, and divides only where nothing remains."""
    while len(parts) > 1:
        rng.shuffle(parts)
        (left, a), (right, b) = parts.pop(), parts.pop()
        signs = ["+", "-", "*", *(["/"] if b and (a / b).denominator == 1 else [])]
        sign = rng.choice(signs)
        value = {"+": a + b, "-": a - b, "*": a * b}[sign] if sign != "/" else a / b
        parts.append((f"({left} {sign} {right})", value))
    return parts[0]


def reaches(answer: str | None, *, numbers: tuple[int, ...], target: int, use_all: bool = True) -> bool:
    """Says whether an expression equals the target and uses the numbers as it may.

    Args:
        answer: the expression.
        numbers: the given ones.
        target: the exact value.
        use_all: whether every number must be used once; otherwise each may be used at most once.

    >>> reaches("3*(25-5)", numbers=(3, 5, 25), target=60), reaches("60", numbers=(3, 5, 25), target=60)
    (True, False)
    """
    if answer is None:
        return False
    try:
        expression = read_arithmetic(answer)
        if expression.value() != target:
            return False
    except ExpressionError:
        return False
    used, given = Counter(expression.numbers()), Counter(map(Fraction, numbers))
    return expression.operators() <= set("+-*/") and (used == given if use_all else used <= given)
