"""Defines the task of the `sums` model: sums and countdowns, worked out in steps.

`examples` draws problems that training never shows, `check` tells whether an answer is right, `answer_of` finds it in a
text, `support` lists every right answer, `parse` tells what a question asks. `partsong_zoo.sums.prompts` holds
the texts the model has learned for thinking with many calls.
"""

from collections.abc import Mapping
from typing import Any

from partsong_zoo.sums.problems import FAMILIES, Family, SumsProblem, answer_of, check, held_out, parse, support
from partsong_zoo.sums.solutions import SumsExample, draw, examples, solve

__all__ = [
    "FAMILIES",
    "SumsExample",
    "Family",
    "SumsProblem",
    "answer_of",
    "check",
    "draw",
    "examples",
    "held_out",
    "parse",
    "solve",
    "support",
    "thinking_knobs",
]


def thinking_knobs(strategy: str) -> Mapping[str, Any]:
    """Returns the knobs that the model needs for a strategy: prompts in its language."""
    from partsong_zoo.sums.prompts import KNOBS

    return KNOBS.get(strategy, {})
