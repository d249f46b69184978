"""Defines the task of the `lists` models: list operations, Latin squares and additions in a small language of words.

`examples` draws prompts with valid answers, `check` reads an answer back, `support` lists every valid answer of a
prompt (all equally likely), `parse` tells what a prompt asks.
"""

from partsong_zoo.lists.requests import GRAMMAR, WORDS, ListRequest, parse
from partsong_zoo.lists.tasks import FAMILIES, ListExample, check, draw, examples, sizes, support

__all__ = [
    "FAMILIES",
    "GRAMMAR",
    "WORDS",
    "ListExample",
    "ListRequest",
    "check",
    "draw",
    "examples",
    "parse",
    "sizes",
    "support",
]
