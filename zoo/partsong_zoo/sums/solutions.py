"""Draws problems and works them out in steps, as training texts: right solutions, and attempts that fail.

There are many ways to the same answer: which product or sum comes first is drawn. So samples of a model trained on them
err in different places, as voting over them needs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from partsong.errors import ArgumentError
from partsong.knobs import Whole, check_knobs, type_hints
from partsong.seeds import derive
from partsong_zoo.sums.problems import FAMILIES, Family, SumsProblem, held_out, parse

__all__ = ["LARGE", "SIZES", "SumsExample", "attempt", "draw", "examples", "near_miss", "searched", "solve"]

#: The largest number that may come up on the way.
LARGEST = 400
_NUMBERS = range(2, 26)
_TARGETS = range(10, 200)
#: How many terms a sum has, and how many numbers a countdown has.
SIZES: dict[Family, tuple[int, ...]] = {"sum": (3, 4, 5), "countdown": (3, 4)}
#: The sizes that take many steps; training begins with them.
LARGE: dict[Family, tuple[int, ...]] = {"sum": (4, 5), "countdown": (4,)}
_TRIES = 100_000


@dataclass(frozen=True, slots=True)
class SumsExample:
    """Holds a problem and one solution of it.

    Attributes:
        family: "sum" or "countdown".
        question: the question.
        solution: steps and answer, as the model should write them.
    """

    family: Family
    question: str
    solution: str


@dataclass(frozen=True, slots=True)
class _Value:
    """Describes a number on the way: its sign in a sum, how it was made, and the rank of its last sign."""

    number: int
    text: str
    rank: int = 3  # 1 for a sum or difference, 2 for a product, 3 for a number as given
    sign: int = 1
    factors: tuple[int, ...] = ()


def draw(family: Family, rng: random.Random, *, fresh: bool, sizes: Sequence[int] = ()) -> SumsExample:
    """Draws a problem with one of its solutions.

    Args:
        family: "sum" or "countdown".
        rng: where the draws come from.
        fresh: whether the problem is one that is kept from training.
        sizes: how many terms (3 to 5) or numbers (3 or 4) it may have; all of these if empty.

    Raises:
        ArgumentError: (a ValueError) there is no such family, or it has no such size.

    >>> draw("sum", random.Random(0), fresh=True).family
    'sum'
    """
    if family not in FAMILIES:
        raise ArgumentError(f"no family {family!r}; there are {', '.join(FAMILIES)}")
    if unknown := [size for size in sizes if size not in SIZES[family]]:
        raise ArgumentError(f"a {family} has sizes {', '.join(map(str, SIZES[family]))}, not {unknown[0]!r}")
    allowed = tuple(sizes) or SIZES[family]
    while True:
        example = _sum(rng, allowed) if family == "sum" else _countdown(rng, allowed)
        if example is not None and held_out(parse(example.question)) == fresh:
            return example


def examples(num: Annotated[int, Whole(0)], seed: int = 0, families: Sequence[Family] = FAMILIES) -> list[SumsExample]:
    """Draws problems that training never shows, the families in turn, each with a solution.

    Args:
        num: how many there are.
        seed: draws them; example i depends on (seed, i, its family) alone.
        families: the families.

    Returns:
        `num` examples.

    Raises:
        ArgumentError: (a ValueError) there is no such family, or nothing to draw from.

    >>> [example.family for example in examples(3)]
    ['sum', 'countdown', 'sum']
    """
    check_knobs(type_hints(examples), {"num": num})
    if not families:
        raise ArgumentError("families is empty; give at least one family")
    turns: list[Family] = [families[index % len(families)] for index in range(num)]
    return [draw(f, random.Random(derive(seed, "sums", f, i)), fresh=True) for i, f in enumerate(turns)]


def _sum(rng: random.Random, sizes: Sequence[int]) -> SumsExample | None:
    num = rng.choice(sizes)
    products = set(rng.sample(range(num), rng.choice((1, 2))))
    text = ""
    for place in range(num):
        sign = rng.choice("+-") if place else ""
        term = f"{rng.randint(2, 9)}*{rng.randint(2, 25)}" if place in products else f"{rng.randint(2, 99)}"
        text += sign + term
    problem = parse(f"{text}=?")
    most = sum(factors[0] * (factors[1] if len(factors) > 1 else 1) for sign, factors in problem.terms if sign > 0)
    if problem.target < 0 or most > LARGEST:
        return None
    return SumsExample("sum", problem.question, solve(problem, rng))


def _countdown(rng: random.Random, sizes: Sequence[int]) -> SumsExample | None:
    num = sizes[0] if len(sizes) == 1 else rng.choice(sizes)
    numbers = tuple(rng.sample(_NUMBERS, num))
    steps = _combine(numbers, rng)
    if steps is None or steps[-1][2].number not in _TARGETS:
        return None
    question = f"make {steps[-1][2].number} from {' '.join(map(str, numbers))}"
    return SumsExample("countdown", question, _solution_text(steps))


# --- steps ------------------------------------------------------------------------------------------------------------

_Step = tuple[str, str, _Value]


def _combine(numbers: Sequence[int], rng: random.Random) -> list[_Step] | None:
    """Draws steps that use up numbers, as (expression, its value as text, the value); None at a dead end."""
    pool, steps = [_Value(number, str(number)) for number in numbers], []
    while len(pool) > 1:
        first, second = rng.sample(pool, 2)
        step = _join(first, second, rng.choice("+-*"))
        rest = [value for value in pool if value is not first and value is not second]
        # If all numbers differ, it is clear which one a later step means.
        if step is None or any(step[2].number == value.number for value in rest):
            if rng.random() < 0.05:
                return None
            continue
        pool = [*rest, step[2]]
        steps.append(step)
    return steps


def _join(first: _Value, second: _Value, sign: str) -> _Step | None:
    """Makes a step of a countdown; None if it leaves the numbers the model knows."""
    large, small = (first, second) if first.number >= second.number else (second, first)
    a, b = (large, small) if sign == "-" else (first, second)
    number = {"+": a.number + b.number, "-": a.number - b.number, "*": a.number * b.number}[sign]
    if not 0 < number <= LARGEST or (sign == "*" and (max(a.number, b.number) > 25 or small.number == 1)):
        return None
    rank = 2 if sign == "*" else 1
    left = f"({a.text})" if a.rank < rank else a.text
    right = f"({b.text})" if b.rank < rank or (sign == "-" and b.rank == 1) else b.text
    return f"{a.number}{sign}{b.number}", str(number), _Value(number, f"{left}{sign}{right}", rank)


def _sum_steps(problem: SumsProblem, rng: random.Random) -> list[_Step]:
    """Draws the steps of a sum: products any time before they are needed, terms in any order that stays positive."""
    pool = [_Value(factors[0], "", 3, sign, factors) for sign, factors in problem.terms]
    steps: list[_Step] = []
    while len(pool) > 1 or len(pool[0].factors) > 1:
        first = rng.choice(pool)
        if len(first.factors) > 1:
            result = _Value(first.factors[0] * first.factors[1], "", 3, first.sign, (0,))
            expression = f"{first.factors[0]}*{first.factors[1]}"
            pool = [result if value is first else value for value in pool]
        else:
            others = [value for value in pool if value is not first and len(value.factors) == 1]
            second = rng.choice(others) if others else None
            if second is None or (first.sign, second.sign) == (-1, 1):
                continue
            number = first.number + first.sign * second.sign * second.number
            if number < 0:
                continue
            expression = f"{first.number}{'+' if first.sign == second.sign else '-'}{second.number}"
            result = _Value(number, "", 3, first.sign, (0,))
            pool = [*(value for value in pool if value is not first and value is not second), result]
        steps.append((expression, str(result.number), result))
    return steps


# --- texts ------------------------------------------------------------------------------------------------------------


def solve(problem: SumsProblem, rng: random.Random) -> str:
    """Draws one of the many right solutions.

    Raises:
        ArgumentError: (a ValueError) random steps do not reach the target of a countdown; perhaps no steps do.

    >>> solve(parse("2*3+4=?"), random.Random(0))
    '2*3=6, 4+6=10. answer: 10'
    """
    if problem.family == "sum":
        return f"{_list_steps(_sum_steps(problem, rng))}. answer: {problem.target}"
    for _ in range(_TRIES):
        steps = _combine(problem.numbers, rng)
        if steps is not None and steps[-1][2].number == problem.target:
            return _solution_text(steps)
    raise ArgumentError(f"no solution of {problem.question!r} in {_TRIES} random tries; is there one?")


def attempt(problem: SumsProblem, rng: random.Random) -> str:
    """Draws steps of a countdown, with right values, that mostly do not reach the target and say so.

    >>> attempt(parse("make 99 from 3 7 2 5"), random.Random(0)).endswith(": no. answer: none")
    True
    """
    while True:
        steps = _combine(problem.numbers, rng)
        if steps is not None:
            break
    return _solution_text(steps) if steps[-1][2].number == problem.target else f"{_list_steps(steps)}: no. answer: none"


def searched(problem: SumsProblem) -> str:
    """Writes a depth-first search for a countdown's target: every step it tries, up to the first that reaches it.

    A last step that misses the target is followed by "!", and where all that can follow a step has been tried, "<" goes
    back to before that step.

    Raises:
        ArgumentError: (a ValueError) no steps reach the target.

    >>> searched(parse("make 15 from 2 3 9"))
    '2+3=5, 5+9=14!9-5=4!5*9=45!<2*3=6, 6+9=15: yes. answer: 2*3+9'
    """
    words: list[str] = []
    if not _search(tuple(_Value(number, str(number)) for number in problem.numbers), problem.target, words):
        raise ArgumentError(f"no solution of {problem.question!r}")
    return "".join(words)


def _search(pool: tuple[_Value, ...], target: int, words: list[str]) -> bool:
    for (i, first), (j, second) in itertools.combinations(enumerate(pool), 2):
        rest = tuple(value for place, value in enumerate(pool) if place not in (i, j))
        for sign in "+-*":
            step = _join(first, second, sign)
            if step is None or any(step[2].number == value.number for value in rest):
                continue
            words.append(f"{step[0]}={step[1]}")
            if not rest and step[2].number == target:
                words.append(f": yes. answer: {step[2].text}")
                return True
            if not rest:
                words.append("!")
                continue
            words.append(", ")
            if _search((step[2], *rest), target, words):
                return True
            words.append("<")
    return False


def near_miss(example: SumsExample, rng: random.Random) -> tuple[str, str]:
    """Moves a countdown's target a little and keeps the steps to the old one: right work, but a wrong end.

    Training may show the new question.

    >>> example = SumsExample("countdown", "make 13 from 3 7 2", "3*2=6, 6+7=13: yes. answer: 3*2+7")
    >>> near_miss(example, random.Random(1))[1]
    '3*2=6, 6+7=13: no. answer: none'
    """
    target = parse(example.question).target
    while True:
        moved = target + rng.choice((-10, -2, -1, 1, 2, 10))
        question = example.question.replace(f"make {target} ", f"make {moved} ")
        if not held_out(parse(question)):
            return question, f"{example.solution.partition(': yes')[0]}: no. answer: none"


def _solution_text(steps: list[_Step]) -> str:
    return f"{_list_steps(steps)}: yes. answer: {steps[-1][2].text}"


def _list_steps(steps: list[_Step]) -> str:
    return ", ".join(f"{expression}={value}" for expression, value, _ in steps)
