"""Reads arithmetic in a model's text with its own parser: exact, bounded, and without evaluating code.

It knows whole and decimal numbers, ``+ - * / ^``, brackets, and LaTeX's ways to write them. Text that is too long or
too deep, or whose value has too many digits, is an error before it costs time: ``9**9**9`` is refused in microseconds.

>>> read_arithmetic("(3 + 5) * 2").value()
Fraction(16, 1)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from partsong.errors import ArgumentError

__all__ = ["MAX_BITS", "MAX_CHARS", "MAX_DEPTH", "Expression", "ExpressionError", "read_arithmetic"]

#: Longest text that is read, deepest nesting, and most bits of a value's numerator or denominator on the way.
MAX_CHARS, MAX_DEPTH, MAX_BITS = 2000, 60, 4096

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


class ExpressionError(ArgumentError):
    """Says that a text is not an arithmetic expression, or that it is too large to be worked out."""


@dataclass(frozen=True, slots=True)
class Expression:
    """Holds an expression, or a part of one.

    Attributes:
        kind: "number"; "sum" or "product", which have any number of parts; "power", which has two.
        number: the value of a number as it is written, 0 for the other kinds.
        parts: the expressions it is made of.
        signs: the sign of each part, -1 where it is subtracted or divided by, otherwise 1.
    """

    kind: Literal["number", "sum", "product", "power"]
    number: Fraction = Fraction(0)
    parts: tuple[Expression, ...] = ()
    signs: tuple[int, ...] = ()

    def value(self) -> Fraction:
        """Works out the exact value.

        Raises:
            ExpressionError: it divides by zero, has a root, or a value on the way has more than `MAX_BITS` bits.

        >>> read_arithmetic("1/3 + 1/6").value()
        Fraction(1, 2)
        """
        if self.kind == "number":
            return self.number
        values = [part.value() for part in self.parts]
        if self.kind == "power":
            return _power(*values)
        total = Fraction(0) if self.kind == "sum" else Fraction(1)
        for sign, value in zip(self.signs, values, strict=True):
            if self.kind == "sum":
                total += sign * value
            elif sign > 0:
                total *= value
            elif value == 0:
                raise ExpressionError("the expression divides by zero")
            else:
                total /= value
            _check_bits(total)
        return total

    def numbers(self) -> list[Fraction]:
        """Returns the numbers that are written in it, from left to right."""
        return [self.number] if self.kind == "number" else [n for part in self.parts for n in part.numbers()]

    def operators(self) -> set[str]:
        """Returns the operators used: "+", "-", "*", "/", "^"."""
        if self.kind == "number":
            return set()
        operators: set[str] = {"^"} if self.kind == "power" else set()
        signs = {"sum": {1: "+", -1: "-"}, "product": {1: "*", -1: "/"}}.get(self.kind, {})
        # The first term has no sign of its own, unless it is negated.
        operators |= {signs[s] for place, s in enumerate(self.signs) if place or s < 0} if signs else set()
        return operators.union(*(part.operators() for part in self.parts))

    def canonical(self) -> str:
        """Returns one spelling for any order of terms and factors, without needless brackets.

        >>> read_arithmetic("(5) + 3*2").canonical() == read_arithmetic("2*3 + 5").canonical()
        True
        """
        text = self._spell()
        return text[1:-1] if self.kind != "number" and text.startswith("(") else text

    def _spell(self) -> str:
        if self.kind == "number":
            return str(self.number) if self.number.denominator == 1 else f"({self.number})"
        if self.kind == "power":
            return f"({self.parts[0]._spell()}^{self.parts[1]._spell()})"
        flat = sorted((-sign, part._spell()) for sign, part in self._flat())
        if len(flat) == 1 and flat[0][0] < 0:  # two minus signs
            return flat[0][1]
        signs = {-1: "+", 1: "-"} if self.kind == "sum" else {-1: "*", 1: "/"}
        return f"({''.join(signs[order] + text for order, text in flat).removeprefix(signs[-1])})"

    def _flat(self) -> Iterator[tuple[int, Expression]]:
        """Yields the parts, with sums within a sum and products within a product taken apart."""
        for sign, part in zip(self.signs, self.parts, strict=True):
            # A divisor stays whole: 1/(2/0) has no value, but 1*0/2 would have one.
            if part.kind == self.kind and (sign > 0 or self.kind == "sum"):
                yield from ((sign * each, leaf) for each, leaf in part._flat())
            else:
                yield sign, part


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


def _check_bits(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ExpressionError(f"a value has more than {MAX_BITS} bits")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ExpressionError("roots are not worked out")
    if base == 0 and exponent < 0:
        raise ExpressionError("the expression divides by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    # Powers of 0, 1 and -1 stay small, but pow() would process the exponent bit by bit.
    if abs(base) in (0, 1):
        return base if exponent % 2 and exponent else base * base if exponent else Fraction(1)
    if bits * abs(exponent) > 2 * MAX_BITS:
        raise ExpressionError(f"a power has more than {MAX_BITS} bits")
    return _check_bits(base ** int(exponent))


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
