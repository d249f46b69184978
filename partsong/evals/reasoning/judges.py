"""Judges that several tasks share."""

from __future__ import annotations

import asyncio

from partsong.reasoning.answers.checking import MathChecker, same_number, shared_checker
from partsong.reasoning.answers.extract_rows import items_of
from partsong.reasoning.answers.sandbox import Runner

__all__ = ["ends_well", "is_list", "is_math", "is_number", "is_text"]


def is_number(answer: str | None, *, gold: str) -> bool:
    """Whether an answer is the gold number, exactly.

    >>> is_number("0.5", gold="1/2"), is_number(None, gold="1")
    (True, False)
    """
    return answer is not None and bool(same_number(gold, answer))


def is_text(answer: str | None, *, gold: str) -> bool:
    """Whether an answer is the gold text, blanks at its ends aside."""
    return answer is not None and answer.strip() == gold.strip()


def is_list(answer: str | None, *, gold: str) -> bool:
    """Whether an answer is the gold list, item by item; both are spelled as `final_list` spells them."""
    return answer is not None and items_of(answer) == items_of(gold)


def is_math(answer: str | None, *, gold: str, checker: MathChecker | None = None) -> bool:
    """Whether a formula is worth the gold one; undecided is wrong, see `partsong.reasoning.answers.checking`.

    Args:
        answer: LaTeX.
        gold: LaTeX.
        checker: compares them. Default: `shared_checker`.

    Raises:
        CheckingError: math-verify is needed and not installed.
    """
    return (checker or shared_checker()).check(gold, answer).right


def ends_well(code: str | None, *, before: str, after: str, runner: Runner) -> bool:
    """Whether a program ends by itself and without an error, between two pieces of our own.

    Args:
        code: what the model wrote.
        before: stands before it, such as what a prompt imports.
        after: stands after it, such as tests.
        runner: runs it. This waits for it in an event loop of its own, so call it from a thread that has none.
    """
    return code is not None and asyncio.run(runner.run(f"{before}{code}{after}")).passed  # type: ignore[arg-type]
