"""Reads the questions of the `sums` model, checks answers, and lists all right ones.

There are two families. A *sum* has one number as its answer: `37+48-19*3+12=?`. A *countdown* asks for a target to be
made from three or four numbers, each used once, with `+`, `-` and `*`: `make 64 from 3 7 25 6`. Its answer is an
expression, `(25-6)*3+7`. Text of a model is read by a parser that never evaluates it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from partsong.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from partsong.reasoning.answers.arithmetic import Expression

__all__ = ["FAMILIES", "Family", "SumsProblem", "answer_of", "check", "held_out", "parse", "support"]

Family = Literal["sum", "countdown"]
FAMILIES: tuple[Family, ...] = ("sum", "countdown")

_SUM = re.compile(r"\d{1,3}(?:\*\d{1,3})?(?:[-+]\d{1,3}(?:\*\d{1,3})?)*")
_COUNTDOWN = re.compile(r"make (\d{1,3}) from (\d{1,3}(?: \d{1,3}){1,3})")
_TERM = re.compile(r"([-+]?)(\d+)(?:\*(\d+))?")
_ANSWER = "answer: "
#: One problem in this many is kept from training.
_HELD_OUT_EVERY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SumsProblem:
    """Describes what a question asks.

    Attributes:
        family: "sum" or "countdown".
        question: the text.
        terms: a sum's terms, each with its sign, +1 or -1, and one or two factors; empty for a countdown.
        numbers: a countdown's numbers, in the order of the question; empty for a sum.
        target: the target of a countdown, or the value of a sum.
    """

    family: Family
    question: str
    terms: tuple[tuple[int, tuple[int, ...]], ...] = ()
    numbers: tuple[int, ...] = ()
    target: int = 0


def parse(question: str) -> SumsProblem:
    """Reads a question.

    Args:
        question: such as `37+48-19*3=?` or `make 64 from 3 7 25 6`; case, and spaces around signs, do not matter.

    Returns:
        The problem.

    Raises:
        ArgumentTypeError: (a TypeError) the question is not text.
        ArgumentError: (a ValueError) it is not of the language; the message shows both forms.

    >>> parse("make 64 from 3 7 25 6").target, parse("37 + 48 - 19*3 = ?").target
    (64, 28)
    """
    if not isinstance(question, str):
        raise ArgumentTypeError(f"a question is text, found {question!r} ({type(question).__name__})")
    text = re.sub(r"\s*([-+*=?])\s*", r"\1", " ".join(question.lower().split()))
    if match := _COUNTDOWN.fullmatch(text):
        numbers = tuple(map(int, match[2].split()))
        return SumsProblem(family="countdown", question=text, numbers=numbers, target=int(match[1]))
    body = text.removesuffix("?").removesuffix("=")
    if _SUM.fullmatch(body) is None:
        raise ArgumentError(
            f"cannot read {question!r}; ask '37+48-19*3=?' or 'make 64 from 3 7 25 6', numbers of at most three digits"
        )
    terms = tuple(
        (-1 if sign == "-" else 1, (int(first), *([int(second)] if second else [])))
        for sign, first, second in _TERM.findall(body)
    )
    target = sum(sign * math.prod(factors) for sign, factors in terms)
    return SumsProblem(family="sum", question=f"{body}=?", terms=terms, target=target)


def held_out(problem: SumsProblem) -> bool:
    """Returns whether training never shows a problem: one in 16, by a hash that ignores the order of numbers or terms.

    >>> held_out(parse("make 64 from 3 7 25 6")) == held_out(parse("make 64 from 25 6 7 3"))
    True
    """
    terms = sorted((sign, *sorted(factors)) for sign, factors in problem.terms)
    named = repr((problem.family, terms, sorted(problem.numbers), problem.target))
    return hashlib.blake2b(named.encode(), digest_size=8).digest()[0] % _HELD_OUT_EVERY == 0


def answer_of(text: str) -> str | None:
    """Finds the answer a text ends with, in one spelling for all that mean the same; None if there is no answer.

    The strategies of `partsong.reasoning` take it as their `extract`.

    Args:
        text: what a model wrote.

    Returns:
        A number, or an expression with terms and factors in a fixed order and without needless brackets.

    >>> answer_of("19*3=57, 85-57=28. answer: 28"), answer_of("7-3=4: no. answer: none")
    ('28', None)
    >>> answer_of("answer: 6+3*25") == answer_of("answer: 25*3+6")
    True
    """
    _, marker, end = text.lower().rpartition(_ANSWER)
    expression = _read(end) if marker else None
    return None if expression is None else expression.canonical()


def check(question: str, answer: str) -> bool:
    """Returns whether an answer is right, which it finds by computing it.

    Args:
        question: a question of the language.
        answer: a number, an expression, or a whole text that ends with one after "answer: ".

    Raises:
        ArgumentTypeError: (a TypeError) the question is not text.
        ArgumentError: (a ValueError) the question is not of the language.

    >>> check("37+48-19*3=?", "28"), check("make 13 from 3 7 2 1", "answer: 3*2+7*1")
    (True, True)
    >>> check("make 13 from 3 7 2 1", "3*2+7"), check("make 13 from 3 7 2 1", "none")
    (False, False)
    """
    from partsong.reasoning.answers.arithmetic import ExpressionError

    problem, expression = parse(question), _read(answer.lower().rpartition(_ANSWER)[2])
    if expression is None or not expression.operators() <= {"+", "-", "*"}:
        return False
    try:
        return _fits(problem, expression) and expression.value() == problem.target
    except ExpressionError:  # a number is too long
        return False


def _read(text: str) -> Expression | None:
    # Every command imports the zoo, but few read an expression.
    from partsong.reasoning.answers.arithmetic import ExpressionError, read_arithmetic

    try:
        return read_arithmetic(text.strip())
    except ExpressionError:
        return None


def _fits(problem: SumsProblem, expression: Expression) -> bool:
    """Returns whether an expression can be an answer: one number for a sum, each number once for a countdown."""
    if problem.family == "sum":
        return len(expression.numbers()) == 1
    return sorted(expression.numbers()) == sorted(problem.numbers)


def support(question: str) -> list[str]:
    """Lists every right answer, in the spelling of `answer_of`, in alphabetical order.

    Args:
        question: a question of the language. Differences of a countdown that would be negative are not tried.

    Raises:
        ArgumentTypeError: (a TypeError) the question is not text.
        ArgumentError: (a ValueError) the question is not of the language.

    >>> [check("make 24 from 4 7 8 8", answer) for answer in support("make 24 from 4 7 8 8")]
    [True, True]
    """
    problem = parse(question)
    if problem.family == "sum":
        expression = _read(str(problem.target))
        assert expression is not None, "a whole number is an expression"
        return [expression.canonical()]
    start = tuple((number, str(number)) for number in problem.numbers)
    expressions = map(_read, _reach(start, problem.target))
    return sorted({expression.canonical() for expression in expressions if expression is not None})


def _reach(pool: tuple[tuple[int, str], ...], target: int) -> set[str]:
    """Finds expressions of the value `target` from all of `pool`, which has values and how they were made."""
    if len(pool) == 1:
        return {pool[0][1]} if pool[0][0] == target else set()
    expressions: set[str] = set()
    for i, j in itertools.combinations(range(len(pool)), 2):
        rest = tuple(pool[k] for k in range(len(pool)) if k not in (i, j))
        (a, left), (b, right) = sorted((pool[i], pool[j]), reverse=True)
        for value, sign in ((a + b, "+"), (a - b, "-"), (a * b, "*")):
            expressions |= _reach((*rest, (value, f"({left}{sign}{right})")), target)
    return expressions
