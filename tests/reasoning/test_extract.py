"""Answers in texts: how they are written, what is no answer, and text that means harm."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from partsong.reasoning.answers.extract import (
    TAIL,
    final_choice,
    final_expression,
    final_math,
    final_number,
    last_boxed,
    normal_math,
    visible_text,
)
from partsong.reasoning.answers.extract_code import final_code
from partsong.reasoning.answers.extract_rows import final_grid, final_list, items_of

EXTRACTORS: list[Callable[[str], str | None]] = [
    *(final_number, final_choice, final_expression, final_math, final_code, last_boxed, final_list),
    lambda text: final_grid(text, 4),
]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *[("#### 1,200", "1200"), ("it costs $18.", "18"), ("-$5", "-5"), ("20-5=15.", "15"), ("5-3", None)],
        *[("x=-3", "-3"), ("−7 degrees", "-7"), ("it is .5", "1/2"), ("3,5,7", None), ("1e5", "100000")],  # noqa: RUF001
        *[(r"\boxed{2^{10}}", "1024"), (r"\boxed{18\text{ dollars}}", "18"), (r"\boxed{x=5}", "5"), ("3.", "3")],
        *[(r"\boxed{-\frac{3}{4}} of 9", "-3/4"), (r"\boxed{50\%}", "50"), (r"\boxed{\$1,234.50}", "2469/2")],
        *[(r"\boxed{90^\circ}", "90"), (r"\boxed{x} or 3", None), (r"answer \frac{3}{4}.", "3/4"), (r"\frac34", "3/4")],
        *[(r"\boxed{3} so \boxed{4} and \boxed{5", "4"), (r"\fbox{6} 7", "6"), ("6/8", "3/4"), ("1/0", None)],
        *[("<think>4</think>", None), ("<think>4", None), ("<think>4</think>5", "5"), ("٣", None), ("no", None)],
        *[(r"\boxed{3\sqrt{2}}", None), (r"\boxed{9^{9^9}} 4", None), ("9" * 5000, None), ("", None)],
        *[("v1.2.3", None), ("10,000,000 of 1,00", None), ("7" + " " * 300_000, None)],
    ],
)
def test_numbers(text: str, answer: str | None) -> None:
    assert final_number(text) == answer


@settings(max_examples=200, deadline=None)
@given(some.fractions(max_denominator=1000), some.sampled_from(["So it is {}.", "\\boxed{{{}}}", "#### {}", "= {} km"]))
def test_every_number_is_found_again(value: object, form: str) -> None:
    assert final_number(f"First 12, then {form.format(value)}") == str(value)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *[("The answer is B", "B"), ("answer: (C)", "C"), ("**Answer:** D", "D"), ("I think A because\n\nB", "B")],
        *[("A dog", None), ("Answer is A's", None), (r"\boxed{\text{(E)}}", "E"), (r"\boxed{F}", None)],
        *[("Answer: A. No: the answer is C.", "C"), ("", None), ("(A) fails, so (B)", "B"), (r"(A) \boxed{no}", None)],
    ],
)
def test_choices(text: str, answer: str | None) -> None:
    assert final_choice(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *[("**(3+5)*2 = 16**", "(3+5)*2"), ("2*(5+3) = 16\nDone!", "(3+5)*2"), (r"so $(3+5) \times 2$", "(3+5)*2")],
        *[("1. (3+5)*2", "(3+5)*2"), ("Answer: 3 + 5.", "3+5"), ("x", None), ("7", None), ("- 5 * 2", "2*5")],
        *[(r"\boxed{(1+2)\cdot 3 = 9}", "(1+2)*3"), ("3 + 5 = 8\n\n`1 + 2`", "1+2"), ("9**9**9**9", "9^(9^(9^9))")],
    ],
)
def test_expressions(text: str, answer: str | None) -> None:
    assert final_expression(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"Hence \boxed{x = \dfrac{1}{2}}.", r"\frac{1}{2}"),
        (r"The answer is $3\sqrt{2}$.", r"3\sqrt{2}"),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})"),
        (r"\boxed{\sin x \cos\theta}", r"\sin x\cos\theta"),
        (r"\boxed{1,000 \text{ cm}^2}", "1000"),
        (r"\boxed{1,2}", "1,2"),
        (r"The answer is \(5\).", "5"),
        (r"\boxed{\text{Evelyn}}", "Evelyn"),
        ("so we get 12", "12"),
        ("who knows", None),
    ],
)
def test_mathematics(text: str, answer: str | None) -> None:
    assert final_math(text) == answer
    if answer is not None:
        assert normal_math(answer) == answer


def test_code_lists_and_grids() -> None:
    two = "```js\n1\n```\n```python\nx = 1\n```\n```text\nout\n```"
    assert (final_code(two), final_code(two, None), final_code(two, "js")) == ("x = 1\n", "out\n", "1\n")
    assert final_code("none") is None and final_code("```py\ny") == "y"
    assert final_list("[1, 2] then [ 3,'b', \"c\",2.50 ]") == "[3, b, c, 5/2]"
    assert final_list("[]") == "[]" and items_of("[]") == []
    assert final_list("[[1, 2], [3, 4]") == "[3, 4]" and final_list("1, 2") is None and final_list("[1,,2]") is None
    assert final_grid("1234\n3412\n2143\n4321", 4) == "1234\n3412\n2143\n4321"
    assert final_grid("| 1 2 | 3 4 |\n|-----|\n| 3 4 | 1 2 |\n\n2 1 4 3\n4,3,2,1\nthat is it", 4) is not None
    assert final_grid("1234\n3412\n2143", 4) is None
    assert final_grid("1234\nfirst\n3412\n2143\n4321", 4) is None


@settings(max_examples=200, deadline=None)
@given(some.lists(some.integers(-999, 999), max_size=12))
def test_lists_of_numbers_come_back(items: list[int]) -> None:
    assert items_of(final_list(f"So [9] becomes {items}.") or "") == [str(item) for item in items]


@settings(max_examples=150, deadline=None)
@given(some.text(max_size=300) | some.text("\\boxed{}[]()$ \n0123456789+-*/=.,answerABC`", max_size=300))
def test_any_text_is_read(text: str) -> None:
    for extract in EXTRACTORS:
        answer = extract(text)
        assert answer is None or isinstance(answer, str)


HOSTILE = [
    *("\\boxed{" * 400_000, "{" * 2_000_000, "}" * 2_000_000, "1," * 1_500_000, "-" * 3_000_000, "```\n" * 700_000),
    *("(A)" * 1_000_000, "answer " * 400_000, "$" * 3_000_000, "1+" * 1_000_000, "\\text{" * 500_000, "\\" * 3_000_000),
    *("9" * 3_000_000, " " * 3_000_000, "\n" * 3_000_000, "(((" * 1_000_000, "1,111," * 500_000, "\\frac" * 500_000),
    *("- " * 1_000_000, "<think>" * 400_000, "[" * 3_000_000, "1 2 3 4\n" * 300_000, "٣" * 1_000_000, "x=" * 1_000_000),
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:8]))
def test_megabytes_take_no_time(text: str) -> None:
    boxed = "\\boxed{" + text[: TAIL - 100] + "}"
    for extract in EXTRACTORS:
        begin = time.process_time()
        extract(text)
        extract(boxed)
        assert time.process_time() - begin < 1.0


def test_the_end_is_what_is_read() -> None:
    assert visible_text("7" + " " * TAIL) == " " * TAIL
    assert final_number("x" * TAIL + " 8") == "8"
