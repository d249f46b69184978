"""Numbers in answers, against a table of spellings: the right value, or none where the whole is not understood."""

from __future__ import annotations

import pytest

from partsong.reasoning.answers.extract import final_number
from partsong.reasoning.answers.numerals import plain_numerals
from tests.reasoning.number_spellings import BOXED, PROSE


def test_the_table_is_large() -> None:
    assert len(set(BOXED)) == len(BOXED) and len(set(PROSE)) == len(PROSE) and len(BOXED) + len(PROSE) >= 150


@pytest.mark.parametrize(("content", "value"), BOXED)
def test_numbers_in_a_box(content: str, value: str | None) -> None:
    assert final_number(f"Of 17 ways, \\boxed{{{content}}} is best.") == value


@pytest.mark.parametrize(("text", "value"), PROSE)
def test_numbers_in_prose(text: str, value: str | None) -> None:
    assert final_number(text) == value


@pytest.mark.parametrize("text", [text for text, _ in BOXED + PROSE])
def test_plain_is_plain(text: str) -> None:
    assert plain_numerals(plain_numerals(text)) == plain_numerals(text)
