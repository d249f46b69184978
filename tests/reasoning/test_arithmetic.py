"""The parser of arithmetic against Python's own grammar, and against text that means harm."""

from __future__ import annotations

import ast
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from partsong.reasoning.answers.arithmetic import MAX_DEPTH, read_arithmetic
from partsong.reasoning.answers.expression import MAX_BITS, ExpressionError


def by_python(text: str) -> tuple[Fraction | None, int]:
    """The value of the tree that Python's parser makes, None where it divides by zero; and the most bits on the way."""
    most = [0]

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, int)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand) if isinstance(node.op, ast.USub) else value(node.operand)
        assert isinstance(node, ast.BinOp)
        left, right = value(node.left), value(node.right)
        plain = {ast.Add: lambda: left + right, ast.Sub: lambda: left - right, ast.Mult: lambda: left * right}
        result = {**plain, ast.Div: lambda: left / right, ast.Pow: lambda: left ** int(right)}[type(node.op)]()
        most.append(max(result.numerator.bit_length(), result.denominator.bit_length()))
        return result

    try:
        return value(ast.parse(text, mode="eval").body), max(most)
    except ZeroDivisionError:
        return None, max(most)


numbers = some.integers(0, 99).map(str)
texts = some.recursive(
    numbers,
    lambda inner: some.one_of(
        some.tuples(inner, some.sampled_from("+-*/"), inner).map(" ".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
        some.tuples(inner, some.integers(0, 3)).map(lambda pair: f"({pair[0]})**{pair[1]}"),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(texts)
def test_values_are_those_of_pythons_grammar(text: str) -> None:
    expected, bits = by_python(text)
    read = read_arithmetic(text)
    if expected is None or bits > MAX_BITS:
        with pytest.raises(ExpressionError):
            read.value()
        return
    assert read.value() == expected
    again = read_arithmetic(read.canonical())
    assert again.value() == expected
    assert sorted(again.numbers()) == sorted(read.numbers())
    assert read.canonical() == again.canonical()


@settings(max_examples=150, deadline=None)
@given(some.text(max_size=80) | some.text("0123456789+-*/^().,{}[]\\frac ×÷−٣²", max_size=60))  # noqa: RUF001
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        value = read_arithmetic(text).value()
    except ExpressionError:
        return
    assert isinstance(value, Fraction)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\frac{3}{4} + 1", Fraction(7, 4)),
        (r"\left( 2 + 3 \right) \times 4 \div 5", Fraction(4)),
        ("1,200.50 - 0.5", Fraction(1200)),
        ("2^3^2", Fraction(512)),
        ("-2^2", Fraction(-4)),
        ("2 × [3 − 1] ÷ {4}", Fraction(1)),  # noqa: RUF001
        ("2^-2", Fraction(1, 4)),
        ("(-1)^1000000001", Fraction(-1)),
        ("0^0", Fraction(1)),
    ],
)
def test_ways_to_write(text: str, value: Fraction) -> None:
    assert read_arithmetic(text).value() == value


@pytest.mark.parametrize(
    "text",
    [
        *("9**9**9", "9**9**9**9", "2^(10^9)", "(2^4000)*(2^4000)", "10**99999999", "7^-(9^99)"),
        *("(" * 1900, "(" * 1000 + "1" + ")" * 1000, "-" * 1500 + "1", "2^" * 900 + "2", r"\frac{" * 300, "1+" * 900),
        *("9" * 3_000_000, "(" * 3_000_000, "1,1,1", "1/0", "0^-1", "4^(1/2)", "٣+1", "², 1", "", "1 2", "abs(1)"),
        *("__import__('os')", "1if 1else 2", "0x10", "1e9", "5!", "a:=3", "1\n\n;2", "1_000", "\\sqrt{4}", "2(3)"),
    ],
)
def test_refused_at_once(text: str) -> None:
    def seconds() -> float:
        begin = time.thread_time()
        with pytest.raises(ExpressionError):
            read_arithmetic(text).value()
        return time.thread_time() - begin

    # The best of three: a garbage collection of everything that the suite holds may fall into one.
    assert min(seconds() for _ in range(3)) < 0.2


def test_depth_is_bounded_and_used() -> None:
    deep = MAX_DEPTH - 1
    assert read_arithmetic("(" * deep + "1" + ")" * deep).value() == 1
    with pytest.raises(ExpressionError, match="deeper"):
        read_arithmetic("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1))


def test_what_an_expression_is_made_of() -> None:
    read = read_arithmetic("25 * (3 - 1) / 2")
    assert read.numbers() == [25, 3, 1, 2]
    assert read.operators() == {"*", "-", "/"}
    assert read_arithmetic("-(3)").operators() == {"-"}
    # What is divided by stays whole, so that a division by zero is not spelled away.
    with pytest.raises(ExpressionError):
        read_arithmetic(read_arithmetic("1/(2/0)").canonical()).value()
