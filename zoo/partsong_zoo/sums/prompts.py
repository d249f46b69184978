"""Holds the prompts the `sums` model has learned, which the strategies of `partsong.reasoning` take as `prompts`.

They are plain text: a question, and below it numbered attempts, or one list of what attempts have found.

>>> from partsong.reasoning.strategies.pdr import pdr
>>> options = {"prompts": PDR, "distillation": "random-k", "keep": MOST_ATTEMPTS}  # pdr(run, question, **options, ...)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partsong.errors import ArgumentError
from partsong.reasoning.strategies.pdr import PdrPrompts
from partsong.reasoning.strategies.rsa import RsaPrompts
from partsong.reasoning.strategies.sequential_refinement import RefinementPrompts
from partsong_zoo.sums.problems import answer_of, parse

__all__ = ["KNOBS", "MOST_ATTEMPTS", "MOST_LISTED", "PDR", "REFINEMENT", "RSA", "again", "distil", "tally"]

_AGAIN, _ATTEMPT = "{{question}}\n{{{below}}}", "\n{number}){text}"
#: For all four distillations of `pdr`. `keep` is at most `MOST_ATTEMPTS`; a round for "summary" at most `MOST_LISTED`.
PDR = PdrPrompts(
    first="{question}",
    again=_AGAIN.format(below="workspace"),
    distil="list:{question}\n{attempts}",
    attempt=_ATTEMPT,
)
#: For `rsa`, with `aggregate` at most `MOST_ATTEMPTS`.
RSA = RsaPrompts(first="{question}", combine=_AGAIN.format(below="candidates"), candidate=_ATTEMPT)
#: For `sequential_refinement`.
REFINEMENT = RefinementPrompts(first="{question}", again="{question}\n\n1){draft}")
#: How many attempts the model has learned to read when it solves a problem, and when it lists their results.
MOST_ATTEMPTS, MOST_LISTED = 4, 8
#: The knobs with which each strategy writes what this model understands, by the strategy's name.
KNOBS: Mapping[str, Mapping[str, Any]] = {
    "pdr": {"prompts": PDR, "distillation": "random-k", "keep": MOST_ATTEMPTS},
    "rsa": {"prompts": RSA, "aggregate": MOST_ATTEMPTS},
    "sequential-refinement": {"prompts": REFINEMENT},
}


def again(question: str, attempts: Sequence[str]) -> str:
    r"""Writes the prompt for another draft, from 1 to 4 earlier attempts.

    >>> again("3+4=?", ["3+4=7. answer: 7"])
    '3+4=?\n\n1)3+4=7. answer: 7'
    """
    return PDR.again.format(question=question, workspace=_number(attempts, MOST_ATTEMPTS))


def again_from(question: str, results: str) -> str:
    r"""Writes the prompt for another draft, from a list of what attempts have found.

    >>> again_from("3+4=?", "found: 7, 8")
    '3+4=?\nfound: 7, 8'
    """
    return PDR.again.format(question=question, workspace=results)


def distil(question: str, attempts: Sequence[str]) -> str:
    r"""Writes the prompt that asks what 1 to 8 attempts have found.

    >>> distil("3+4=?", ["3+4=7. answer: 7"])
    'list:3+4=?\n\n1)3+4=7. answer: 7'
    """
    return PDR.distil.format(question=question, attempts=_number(attempts, MOST_LISTED))


def tally(question: str, attempts: Sequence[str]) -> str:
    """Writes the right reply to `distil`: a sum's results in order, or a countdown's first success.

    >>> tally("3+4=?", ["3+4=7. answer: 7", "3+4=8. answer: 8"])
    'found: 7, 8'
    >>> tally("make 9 from 4 5", ["5-4=1: no. answer: none"])
    'found: none'
    """
    results = [text.rpartition("answer: ")[2] for text in attempts if answer_of(text) is not None]
    if parse(question).family == "countdown":
        results = results[:1]
    return f"found: {', '.join(results) or 'none'}"


def _number(attempts: Sequence[str], most: int) -> str:
    if not 1 <= len(attempts) <= most:
        raise ArgumentError(f"{len(attempts)} attempts are given with the question; the model reads 1 to {most}")
    return "".join(PDR.attempt.format(number=place + 1, text=text) for place, text in enumerate(attempts))
