"""What a run may spend, what it has spent, and the error of having spent it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from partsong.errors import ArgumentError, PartsongError
from partsong.reasoning.calls.call import Usage

__all__ = ["Budget", "BudgetError", "Price", "Spending"]


class BudgetError(PartsongError, RuntimeError):
    """A run has spent what it may; calls under way are cancelled, nothing that is complete is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Money per million tokens, in whatever currency.

    Attributes:
        prompt: of prompts.
        cached: of prompts whose keys were there already.
        completion: of answers.
    """

    prompt: float = 0.0
    cached: float = 0.0
    completion: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits of a run; None is no limit.

    Attributes:
        tokens: written by all calls.
        calls: begun.
        seconds: since the first call.
        money: by `price`.
        price: of tokens; needed for `money`.

    >>> Budget(tokens=1000).validate()
    """

    tokens: int | None = None
    calls: int | None = None
    seconds: float | None = None
    money: float | None = None
    price: Price | None = None

    def validate(self) -> None:
        """Refuses limits that are none.

        Raises:
            ArgumentError: a limit is not positive, or there is no price.
        """
        for name in (field.name for field in fields(self) if field.name != "price"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value > 0 or not math.isfinite(value)):
                raise ArgumentError(f"budget {name}={value!r}; use a positive number, or None for no limit")
        if self.money is not None and self.price is None:
            raise ArgumentError(f"budget money={self.money} needs a price of tokens")


class Spending:
    """What a run has spent, a journal's calls included; asked at every report of every call, so it keeps sums.

    Args:
        budget: its limits.
        past: calls of earlier parts of the run.
        seconds: what those took.

    Attributes:
        calls: begun.
        tokens: written by all calls, those under way included.
        exceeded: what was used up first, in words; None while there is some of everything left.
    """

    def __init__(self, budget: Budget, past: Sequence[Usage] = (), seconds: float = 0.0) -> None:
        budget.validate()
        self.budget, self.calls, self.tokens = budget, len(past), 0
        self.exceeded: str | None = None
        self._price, self._paid = budget.price or Price(), 0.0
        self._before = seconds
        self._begin: float | None = None
        self._under_way: dict[str, int] = {}
        self._running = 0
        for usage in past:
            self.done("", usage)

    @property
    def seconds(self) -> float:
        """Since this was first asked, by the clock of the event loop, and what was spent before."""
        now = asyncio.get_running_loop().time()
        if self._begin is None:
            self._begin = now
        return self._before + now - self._begin

    @property
    def money(self) -> float:
        """At the budget's price."""
        return (self._paid + self._running * self._price.completion) / 1e6

    def progress(self, name: str, tokens: int) -> bool:
        """Notes how far a call is; whether the budget has just been used up."""
        more = tokens - self._under_way.get(name, 0)
        self._under_way[name] = tokens
        self.tokens += more
        self._running += more
        return self.exceeded is None and self.check() is not None

    def done(self, name: str, usage: Usage) -> None:
        """Notes the end of a call."""
        running = self._under_way.pop(name, 0)
        self._running -= running
        self.tokens += usage.completion + usage.wasted - running
        price = self._price
        self._paid += (usage.prompt - usage.cached) * price.prompt + usage.cached * price.cached
        self._paid += (usage.completion + usage.wasted) * price.completion

    def out_of_time(self) -> None:
        """Notes that an alarm for the last second has rung, whatever rounding makes of the clock."""
        self.exceeded = self.exceeded or f"{self.seconds:.6g} of {self.budget.seconds:.6g} seconds"

    def check(self, *, before_a_call: bool = False) -> str | None:
        """What is used up, in words; a number of calls is used up before the next one only."""
        for name in ("tokens", "seconds", "money", "calls"):
            limit = getattr(self.budget, name)
            if self.exceeded is not None or limit is None or (name == "calls" and not before_a_call):
                continue
            if (found := getattr(self, name)) >= limit:
                self.exceeded = f"{found:.6g} of {limit:.6g} {name}"
        return self.exceeded
