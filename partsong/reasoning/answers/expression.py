"""Holds arithmetic expressions and works them out, exactly and within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from partsong.errors import ArgumentError

__all__ = ["Expression", "ExpressionError", "MAX_BITS"]

#: Most bits of a value's numerator or denominator on the way.
MAX_BITS = 4096


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
