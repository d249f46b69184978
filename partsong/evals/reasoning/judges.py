"""Judges answers; several tasks share these functions."""

from __future__ import annotations

import asyncio
import hashlib
import os

from partsong.reasoning.answers.checking import MathChecker, same_number, shared_checker
from partsong.reasoning.answers.extract_rows import items_of
from partsong.reasoning.answers.sandbox import Runner

__all__ = ["ends_well", "is_list", "is_math", "is_number", "is_text", "passes"]


def is_number(answer: str | None, *, gold: str) -> bool:
    """Says whether an answer is the gold number, exactly.

    >>> is_number("0.5", gold="1/2"), is_number(None, gold="1")
    (True, False)
    """
    return answer is not None and bool(same_number(gold, answer))


def is_text(answer: str | None, *, gold: str) -> bool:
    """Says whether an answer is the gold text, apart from blanks at its ends."""
    return answer is not None and answer.strip() == gold.strip()


def is_list(answer: str | None, *, gold: str) -> bool:
    """Says whether an answer has the items of the gold list; both are spelled as by `final_list`."""
    return answer is not None and items_of(answer) == items_of(gold)


def is_math(answer: str | None, *, gold: str, checker: MathChecker | None = None) -> bool:
    """Says whether a formula equals the gold one; see `partsong.reasoning.answers.checking`. An undecided one is wrong.

    Args:
        answer: LaTeX.
        gold: LaTeX.
        checker: compares them; None is `shared_checker`.

    Raises:
        CheckingError: math-verify is needed and not installed.
    """
    return (checker or shared_checker()).check(gold, answer).right


def ends_well(code: str | None, *, before: str, after: str, runner: Runner) -> bool:
    """Says whether a program passes tests: whether it and they run to their end without an error.

    It does not pass by leaving early. What it does only as a program of its own, behind ``if __name__ ==
    "__main__"``, is not done.

    Args:
        code: what the model wrote.
        before: code that comes before it, such as the imports of a prompt.
        after: code that comes after it, such as tests.
        runner: runs the program. It is awaited in a new event loop, so the calling thread must have none.
    """
    if code is None:
        return False
    source = f"{before}{code}{after}"
    return passes(f'exec(compile({source!r}, "program.py", "exec"), {{"__name__": "program"}})', runner)


def passes(program: str, runner: Runner) -> bool:
    """Says whether a program runs to its last line; one that leaves before, even with exit code 0, does not pass.

    Args:
        program: Python.
        runner: as for `ends_well`.
    """
    # What runs cannot know this word, so it cannot write it by itself.
    word = hashlib.blake2b(program.encode(), key=os.urandom(16), digest_size=16).hexdigest()
    end = f"\nimport sys\nprint({word!r}, file=sys.__stdout__, flush=True)\n"
    outcome = asyncio.run(runner.run(program + end))  # type: ignore[arg-type]
    return outcome.passed and word in outcome.output
