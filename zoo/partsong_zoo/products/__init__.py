"""Defines the task of the `products` model: multiplications and countdowns, worked out in threads.

`examples` draws problems that training never shows, `check` tells whether an answer is right, `answer_of` finds it in a
text, `parse` tells what a question asks, `support` lists every right answer; `work_out`, `in_threads` and `in_sequence`
write solutions.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from partsong_zoo.products.problems import (
    Family,
    ProductProblem,
    answer_of,
    check,
    draw,
    examples,
    held_out,
    parse,
    support,
)

if TYPE_CHECKING:
    from partsong_zoo.products.solutions import ProductWork, Thread, in_sequence, in_threads, work_out

__all__ = [
    "Family",
    "ProductProblem",
    "Thread",
    "ProductWork",
    "answer_of",
    "check",
    "draw",
    "examples",
    "held_out",
    "in_sequence",
    "in_threads",
    "parse",
    "support",
    "thinking_knobs",
    "work_out",
]


def thinking_knobs(strategy: str) -> Mapping[str, Any]:
    """Returns the knobs that the model needs for a strategy: its tags, without a lesson in them."""
    return {"format": "multiverse", "teach": False} if strategy == "fork-join" else {}


def __getattr__(name: str) -> Any:
    """Looks up what is in `solutions`, which loads all of partsong's reasoning, when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("partsong_zoo.products.solutions"), name)
