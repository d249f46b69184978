"""Checks the knobs of a strategy against its annotations, before it makes any call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

from partsong.knobs import Whole, check_knobs, type_hints
from partsong.reasoning.calls.answer import Answer

__all__ = ["Widths", "checked"]

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Widths:
    """Bounds sequences to positive integers that end with 1: how many calls each round makes.

    Example:
        >>> Widths().holds((8, 4, 1))
        True
    """

    def holds(self, value: Any) -> bool:
        """Returns whether a value is such a sequence."""
        return isinstance(value, Sequence) and len(value) > 0 and all(map(Whole(1).holds, value)) and value[-1] == 1

    def __str__(self) -> str:
        return "positive integers that end with 1, such as (8, 4, 1)"


def checked(strategy: Callable[P, Coroutine[Any, Any, Answer]]) -> Callable[P, Coroutine[Any, Any, Answer]]:
    """Decorates a strategy so that it refuses knobs its annotations do not allow before it begins."""

    @functools.wraps(strategy)
    async def check_and_run(*args: P.args, **kwargs: P.kwargs) -> Answer:
        check_knobs(type_hints(strategy), kwargs)
        return await strategy(*args, **kwargs)

    return check_and_run
