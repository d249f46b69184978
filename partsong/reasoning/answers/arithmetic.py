"""Reads arithmetic in a model's text with its own parser: exact, bounded, and without evaluating code.

It knows whole and decimal numbers, ``+ - * / ^``, brackets, and LaTeX's ways to write them. Text that is too long or
too deep, or whose value has too many digits, is an error before it costs time: ``9**9**9`` is refused in microseconds.

>>> read_arithmetic("(3 + 5) * 2").value()
Fraction(16, 1)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

from partsong.reasoning.answers.expression import Expression, ExpressionError

__all__ = ["MAX_CHARS", "MAX_DEPTH", "read_arithmetic"]

#: Longest text that is read, and deepest nesting.
MAX_CHARS, MAX_DEPTH = 2000, 60

_NAMES = {
    **{r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": " ", r"\right": " ", r"\dfrac": r"\frac"},
    **{r"\tfrac": r"\frac", r"\frac": r"\frac"},
}

_SIGNS = {"**": "^", "×": "*", "·": "*", "∗": "*", "÷": "/", "−": "-", "–": "-", "{": "(", "[": "(", "}": ")", "]": ")"}  # noqa: RUF001
_TOKEN = re.compile(
    r"(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"|(?P<name>\\[A-Za-z]+)|(?P<space>\\[,!; ]|~|[ \t\r\n]+)"
    r"|(?P<sign>\*\*|[-+*/^()\[\]{}×·∗÷−–])"  # noqa: RUF001
)


def read_arithmetic(text: str) -> Expression:
    r"""Reads an expression; the whole text has to be one.

    Args:
        text: the expression, such as ``(75 - 5) * 3`` or ``\frac{1}{2} \cdot 8``.

    Raises:
        ExpressionError: the text is not an expression, is longer than `MAX_CHARS`, or is deeper than `MAX_DEPTH`.

    >>> read_arithmetic(r"\frac{1}{2} \times 8").value()
    Fraction(4, 1)
    """
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"an expression of {len(text)} characters is too long; at most {MAX_CHARS} are read")
    return _Reader(list(_tokens(text))).read_all()


def _tokens(text: str) -> Iterator[str | Fraction]:
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ExpressionError(f"{text[place : place + 12]!r} is not arithmetic")
        place = match.end()
        token = match.group()
        if match.lastgroup == "number":
            yield Fraction(token.replace(",", ""))
        elif match.lastgroup == "name":
            if token not in _NAMES:
                raise ExpressionError(f"{token[:12]!r} is not arithmetic")
            if _NAMES[token] != " ":
                yield _NAMES[token]
        elif match.lastgroup == "sign":
            yield _SIGNS.get(token, token)


class _Reader:
    """Reads tokens by recursive descent; only brackets, powers and signs go deeper."""

    def __init__(self, tokens: list[str | Fraction]) -> None:
        self.tokens, self.place, self.depth = tokens, 0, 0

    def read_all(self) -> Expression:
        expression = self.sum()
        if self.place < len(self.tokens):
            raise ExpressionError(f"unexpected {self.tokens[self.place]} in an expression")
        return expression

    def peek(self) -> str | Fraction | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def take(self, *signs: str) -> str | None:
        """Takes the next token if it is one of these signs, and returns it."""
        token = self.peek()
        if isinstance(token, str) and token in signs:
            self.place += 1
            return token
        return None

    def go_deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ExpressionError(f"an expression is nested deeper than {MAX_DEPTH}")

    def sum(self) -> Expression:
        return self.chain("sum", "+", "-")

    def chain(self, kind: Literal["sum", "product"], up: str, down: str) -> Expression:
        """Reads parts between operators of one rank."""
        inner = self.signed if kind == "product" else lambda: self.chain("product", "*", "/")
        parts, signs = [inner()], [1]
        while sign := self.take(up, down):
            signs.append(1 if sign == up else -1)
            parts.append(inner())
        return parts[0] if len(parts) == 1 else Expression(kind, Fraction(0), tuple(parts), tuple(signs))

    def signed(self) -> Expression:
        sign = self.take("+", "-")
        if sign is None:
            return self.power()
        self.go_deeper()
        term = self.signed()
        self.depth -= 1
        return term if sign == "+" else Expression("sum", Fraction(0), (term,), (-1,))

    def power(self) -> Expression:
        base = self.atom()
        if not self.take("^"):
            return base
        self.go_deeper()
        exponent = self.signed()  # powers group to the right: 2^3^2 is 2^9
        self.depth -= 1
        return Expression("power", Fraction(0), (base, exponent), (1, 1))

    def atom(self) -> Expression:
        token = self.peek()
        if isinstance(token, Fraction):
            self.place += 1
            return Expression("number", token)
        if self.take(r"\frac"):
            return Expression("product", Fraction(0), (self.bracket(), self.bracket()), (1, -1))
        return self.bracket()

    def bracket(self) -> Expression:
        if not self.take("("):
            raise ExpressionError(f"expected a number or a bracket, found {self.peek() or 'the end'}")
        self.go_deeper()
        expression = self.sum()
        if not self.take(")"):
            raise ExpressionError("a bracket is not closed")
        self.depth -= 1
        return expression
