"""Reads the questions of the `products` model: multiplications such as `4729*386=?`, and countdowns of three numbers.

Countdowns, `make 64 from 3 7 25`, are read and checked as in `partsong_zoo.sums`. Text of a model is read by a parser
that never evaluates it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Literal

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.seeds import derive
from partsong_zoo import sums

__all__ = [
    "ANSWER",
    "SIZES",
    "Family",
    "ProductProblem",
    "answer_of",
    "check",
    "examples",
    "held_out",
    "parse",
    "support",
]

Family = Literal["product", "countdown"]

#: The words before a text's answer.
ANSWER = "answer: "
#: Numbers of digits of the two factors that training shows, and that `examples` draws by default.
SIZES = tuple((first, second) for first in (2, 3, 4) for second in (2, 3, 4))
_PRODUCT = re.compile(r"([1-9]\d{0,8})\*([1-9]\d{0,8})(?:=\??)?")
#: One problem in this many is kept from training.
_HELD_OUT_EVERY = 16
_NUMBERS, _LARGEST = 3, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductProblem:
    """Describes what a question asks.

    Attributes:
        family: "product" or "countdown".
        question: the text.
        numbers: the factors, or a countdown's numbers, in the order of the question.
        target: the product, or the target of a countdown.
    """

    family: Family
    question: str
    numbers: tuple[int, ...]
    target: int


def parse(question: str) -> ProductProblem:
    """Reads a question.

    Args:
        question: such as `4729*386=?`, factors of at most nine digits, or `make 64 from 3 7 25`; case, and spaces
            around signs, do not matter.

    Returns:
        The problem.

    Raises:
        ArgumentTypeError: (a TypeError) the question is not text.
        ArgumentError: (a ValueError) it is not of the language; the message shows both forms.

    >>> parse("12 * 34 = ?").target, parse("make 64 from 3 7 25").numbers
    (408, (3, 7, 25))
    """
    if not isinstance(question, str):
        raise ArgumentTypeError(f"a question is text, found {question!r} ({type(question).__name__})")
    text = re.sub(r"\s*([-+*=?])\s*", r"\1", " ".join(question.lower().split()))
    if match := _PRODUCT.fullmatch(text):
        first, second = int(match[1]), int(match[2])
        return ProductProblem(
            family="product", question=f"{first}*{second}=?", numbers=(first, second), target=first * second
        )
    if text.startswith("make "):
        problem = sums.parse(text)
        if len(problem.numbers) == _NUMBERS:
            return ProductProblem(family="countdown", question=text, numbers=problem.numbers, target=problem.target)
    raise ArgumentError(
        f"cannot read {question!r}; ask '4729*386=?', factors of at most nine digits, or 'make 64 from 3 7 25', three "
        f"numbers"
    )


def held_out(problem: ProductProblem) -> bool:
    """Returns whether training never shows a problem: one in 16, by a hash that ignores the order of its numbers.

    >>> held_out(parse("12*34=?")) == held_out(parse("34*12=?"))
    True
    """
    named = repr((problem.family, sorted(problem.numbers), problem.target))
    return hashlib.blake2b(named.encode(), digest_size=8).digest()[0] % _HELD_OUT_EVERY == 0


def answer_of(text: str) -> str | None:
    """Finds the answer a text ends with, in one spelling for all that mean the same; None if there is no answer.

    The strategies of `partsong.reasoning` take it as their `extract`.

    >>> answer_of("...;answer: 408"), answer_of("408")
    ('408', None)
    """
    return sums.answer_of(text)


def check(question: str, answer: str) -> bool:
    """Returns whether an answer, or a text that ends with one, is right; it is read and computed, never evaluated.

    Raises:
        ArgumentTypeError: (a TypeError) the question is not text.
        ArgumentError: (a ValueError) the question is not of the language.

    >>> check("12*34=?", "408"), check("12*34=?", "12*34"), check("make 64 from 3 7 13", "answer: 13*7-3")
    (True, False, False)
    """
    problem = parse(question)
    if problem.family == "countdown":
        return sums.check(problem.question, answer)
    return answer.lower().rpartition(ANSWER)[2].strip() == str(problem.target)


def support(question: str) -> list[str]:
    """Lists every right answer, in the spelling of `answer_of`, in alphabetical order.

    Raises:
        ArgumentTypeError: (a TypeError) the question is not text.
        ArgumentError: (a ValueError) the question is not of the language.

    >>> support("12*34=?"), support("make 9 from 2 3 3")
    (['408'], ['(2*3)+3'])
    """
    problem = parse(question)
    return [str(problem.target)] if problem.family == "product" else sums.support(problem.question)


def draw(family: Family, rng: Random, *, fresh: bool, sizes: Sequence[tuple[int, int]] = SIZES) -> ProductProblem:
    """Draws a problem.

    Args:
        family: the kind of problem.
        rng: where the draws come from.
        fresh: whether the problem is one that training never shows.
        sizes: numbers of digits of a product's two factors, drawn evenly.

    >>> draw("product", Random(0), fresh=True, sizes=[(2, 3)]).question
    '89*918=?'
    """
    while True:
        problem = _product(rng, sizes) if family == "product" else _countdown(rng)
        if held_out(problem) == fresh:
            return problem


def _product(rng: Random, sizes: Sequence[tuple[int, int]]) -> ProductProblem:
    first, second = (rng.randrange(10 ** (digits - 1), 10**digits) for digits in rng.choice(sizes))
    return parse(f"{first}*{second}=?")


def _countdown(rng: Random) -> ProductProblem:
    """Draws three numbers and a target that can be reached."""
    while True:
        value, *others = numbers = [rng.randint(1, _LARGEST) for _ in range(_NUMBERS)]
        for other in others:
            value = rng.choice((value + other, abs(value - other), value * other))
        if 0 < value < 1000:
            rng.shuffle(numbers)
            return parse(f"make {value} from {' '.join(map(str, numbers))}")


def examples(
    num: int, seed: int, family: Family = "product", *, sizes: Sequence[tuple[int, int]] = SIZES
) -> list[ProductProblem]:
    """Draws different fresh problems, as a function of the arguments.

    Raises:
        ArgumentError: (a ValueError) there are fewer than `num` such problems.

    >>> [problem.question for problem in examples(2, seed=0)]
    ['823*2319=?', '48*883=?']
    """
    problems: dict[tuple[tuple[int, ...], int], ProductProblem] = {}
    for problem in islice(_fresh(seed, family, sizes), 100 * num):
        problems.setdefault((problem.numbers, problem.target), problem)
        if len(problems) == num:
            return list(problems.values())
    raise ArgumentError(f"{num} fresh problems of the sizes {sizes} were asked for, {len(problems)} were found")


def _fresh(seed: int, family: Family, sizes: Sequence[tuple[int, int]]) -> Iterator[ProductProblem]:
    number = 0
    while True:
        yield draw(family, Random(derive(seed, "products", family, number)), fresh=True, sizes=sizes)
        number += 1
