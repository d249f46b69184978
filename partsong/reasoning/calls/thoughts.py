"""Finds where an answer begins that hidden reasoning comes before, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["THINK_TAGS", "answer_start", "are_open", "first_stop"]

#: What most open models write around their thoughts.
THINK_TAGS = ("<think>", "</think>")


def are_open(text: str) -> bool:
    """Returns whether a text ends within thoughts, as the prompts of some chat templates do.

    >>> are_open("<|assistant|><think>"), are_open("<think></think>4")
    (True, False)
    """
    return text.rfind(THINK_TAGS[0]) > text.rfind(THINK_TAGS[1])


def answer_start(text: str, *, opened: bool = False, whole: bool = True) -> int | None:
    """Returns where the answer begins in a text that may begin with thoughts; None while that is not known.

    Args:
        text: what the model wrote so far.
        opened: whether the prompt ended within thoughts.
        whole: whether nothing more is written.

    >>> answer_start("<think>a</think>b"), answer_start("<think>a"), answer_start("b"), answer_start("<th", whole=False)
    (16, None, 0, None)
    """
    begin, (opening, closing) = text.lstrip(), THINK_TAGS
    if not opened and not begin.startswith(opening):
        return None if not whole and opening.startswith(begin) else 0
    end = text.find(closing)
    return None if end < 0 else end + len(closing)


def first_stop(text: str, stops: Sequence[str], begin: int = 0) -> int | None:
    """Returns the place of the earliest stop string in a text from `begin` on; None without one.

    >>> first_stop("a.b,c.", [".", ","], 2)
    3
    """
    return min((place for stop in stops if (place := text.find(stop, begin)) >= 0), default=None)
