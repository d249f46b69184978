"""What the knobs of strategies may be, said once in their annotations and checked before any call is made."""

from __future__ import annotations

import collections.abc
import functools
import math
import types
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, ParamSpec, Protocol, Union, get_args, get_origin, get_type_hints

from partsong.errors import ArgumentError
from partsong.reasoning.calls.answer import Answer
from partsong.reasoning.strategies.prompts import Prompts

__all__ = ["AboveZero", "Count", "Number", "Share", "Whole", "Widths", "check_knobs", "checked", "hints_of"]

P = ParamSpec("P")
#: A strategy.
Strategy = Callable[..., Coroutine[Any, Any, Answer]]


class _Rule(Protocol):
    def check(self, name: str, value: Any) -> None:
        """Raises `ArgumentError` for a value that cannot be."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Integers of `low` or more.

    >>> Whole(1).check("num", 3)
    """

    low: int = 1

    def check(self, name: str, value: Any) -> None:
        """Refuses what is none."""
        if isinstance(value, bool) or not isinstance(value, int) or value < self.low:
            wanted = "a positive integer" if self.low == 1 else f"an integer of {self.low} or more"
            raise ArgumentError(f"{name}={value!r}; use {wanted}")


@dataclass(frozen=True, slots=True)
class Number:
    """Numbers from `low` to `high`, or above `low`.

    >>> Number(0, 1).check("top", 0.5)
    """

    low: float = 0.0
    high: float = math.inf
    above: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuses what is none."""
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or value > self.high or value < self.low or (self.above and value == self.low):
            edge = "above" if self.above else "from"
            end = f" to {self.high:g}" if math.isfinite(self.high) else ("" if self.above else " on")
            raise ArgumentError(f"{name}={value!r}; use a number {edge} {self.low:g}{end}")


@dataclass(frozen=True, slots=True)
class Widths:
    """Positive integers that end with 1: how many calls each round makes.

    >>> Widths().check("schedule", (8, 4, 1))
    """

    def check(self, name: str, value: Any) -> None:
        """Refuses what is none."""
        whole = isinstance(value, Sequence) and all(isinstance(m, int) and not isinstance(m, bool) for m in value)
        if not whole or not value or min(value) < 1 or value[-1] != 1:
            shown = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
            raise ArgumentError(f"{name}={shown!r}; use positive integers that end with 1, such as (8, 4, 1)")


Count = Annotated[int, Whole(1)]
Share = Annotated[float, Number(0.0, 1.0)]
AboveZero = Annotated[float, Number(0.0, above=True)]


def checked(strategy: Callable[P, Coroutine[Any, Any, Answer]]) -> Callable[P, Coroutine[Any, Any, Answer]]:
    """A strategy that refuses knobs its annotations do not allow, before it begins."""

    @functools.wraps(strategy)
    async def careful(*args: P.args, **kwargs: P.kwargs) -> Answer:
        check_knobs(strategy, kwargs)
        return await strategy(*args, **kwargs)

    return careful


def check_knobs(strategy: Strategy, values: Mapping[str, Any]) -> None:
    """Refuses values that a strategy's annotations do not allow.

    Raises:
        ArgumentError: names the knob, what it was and what it may be.
    """
    for name, value in values.items():
        if name in hints_of(strategy):
            _check(name, value, hints_of(strategy)[name])


@functools.cache
def hints_of(strategy: Strategy) -> Mapping[str, Any]:
    """Annotations of a strategy by name, `Annotated` kept."""
    return get_type_hints(strategy, include_extras=True)


def _check(name: str, value: Any, hint: Any) -> None:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        if len(kinds) == 1:
            _check(name, value, kinds[0])
    elif origin is Annotated:
        rules: Sequence[_Rule] = hint.__metadata__
        for rule in rules:
            rule.check(name, value)
    elif origin is Literal and value not in get_args(hint):
        raise ArgumentError(f"{name}={value!r}; use {', '.join(map(str, get_args(hint)))}")
    elif hint is bool and not isinstance(value, bool):
        raise ArgumentError(f"{name}={value!r}; use True or False")
    elif origin is collections.abc.Callable:
        if not callable(value):
            raise ArgumentError(f"{name}={value!r} cannot be called; give a function")
    elif isinstance(hint, type) and issubclass(hint, Prompts):
        if not isinstance(value, hint):
            raise ArgumentError(f"{name}={value!r}; use an instance of {hint.__name__}")
        value.validate()
