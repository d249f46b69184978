"""Limits what a run may spend, counts what it has spent, and reports when the budget is used up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from partsong.errors import ArgumentError, PartsongError
from partsong.knobs import AboveZero, Count, check_fields
from partsong.reasoning.calls.call import Usage

__all__ = ["Budget", "BudgetError", "Price", "Spending"]


class BudgetError(PartsongError, RuntimeError):
    """Says that a run has spent its budget. Running calls are cancelled; completed calls are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Holds the price of a million tokens, in any currency.

    Attributes:
        prompt: price of prompt tokens.
        cached: price of prompt tokens whose keys were there already.
        completion: price of answer tokens.
    """

    prompt: float = 0.0
    cached: float = 0.0
    completion: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Holds the limits of a run; None sets no limit.

    Attributes:
        tokens: most tokens written by all calls.
        calls: most calls begun.
        seconds: most seconds since the first call.
        money: most money spent, by `price`.
        price: price of tokens; needed for `money`.

    >>> Budget(tokens=1000).validate()
    """

    tokens: Count | None = None
    calls: Count | None = None
    seconds: AboveZero | None = None
    money: AboveZero | None = None
    price: Price | None = None

    def validate(self) -> None:
        """Refuses limits that are not positive, and a limit of money without a price.

        Raises:
            ArgumentError: names the limit.
        """
        check_fields(self)
        if self.money is not None and self.price is None:
            raise ArgumentError(f"budget money={self.money} needs a price of tokens")


class Spending:
    """Counts what a run has spent. It is called at every report of every call, so it keeps sums.

    A journal holds the usage of the calls in earlier parts of the run, `past`, and how many `seconds` those took.
    Running calls count in `tokens`. `exceeded` says in words what was used up first; it is None while something of
    everything is left.
    """

    def __init__(self, budget: Budget, past: Sequence[Usage] = (), seconds: float = 0.0) -> None:
        budget.validate()
        self.budget, self.calls, self.tokens = budget, len(past), 0
        self.exceeded: str | None = None
        self._price, self._paid = budget.price or Price(), 0.0
        self._before = seconds
        self._begin: float | None = None
        self._running: dict[str, int] = {}
        self._running_tokens = 0
        for usage in past:
            self.done("", usage)

    @property
    def seconds(self) -> float:
        """Returns the seconds since this was first asked, by the clock of the event loop, and those spent before."""
        now = asyncio.get_running_loop().time()
        if self._begin is None:
            self._begin = now
        return self._before + now - self._begin

    @property
    def money(self) -> float:
        """Returns the money spent, at the budget's price."""
        return (self._paid + self._running_tokens * self._price.completion) / 1e6

    def progress(self, name: str, tokens: int) -> bool:
        """Notes how many tokens a call has written; returns whether that used up the budget."""
        more = tokens - self._running.get(name, 0)
        self._running[name] = tokens
        self.tokens += more
        self._running_tokens += more
        return self.exceeded is None and self.check() is not None

    def done(self, name: str, usage: Usage) -> None:
        """Notes the end of a call."""
        running = self._running.pop(name, 0)
        self._running_tokens -= running
        self.tokens += usage.completion + usage.wasted - running
        price = self._price
        self._paid += (usage.prompt - usage.cached) * price.prompt + usage.cached * price.cached
        self._paid += (usage.completion + usage.wasted) * price.completion

    def out_of_time(self) -> None:
        """Notes that the time is up, even if rounding leaves the clock a little short of it."""
        self.exceeded = self.exceeded or f"{self.seconds:.6g} of {self.budget.seconds:.6g} seconds"

    def check(self, *, before_a_call: bool = False) -> str | None:
        """Returns what is used up, in words. The limit of calls is checked only before another one begins."""
        limits = self.budget
        if self.exceeded is None and limits.tokens is not None:
            self._compare(self.tokens, limits.tokens, "tokens")
        if self.exceeded is None and limits.seconds is not None:
            self._compare(self.seconds, limits.seconds, "seconds")
        if self.exceeded is None and limits.money is not None:
            self._compare(self.money, limits.money, "money")
        if self.exceeded is None and limits.calls is not None and before_a_call:
            self._compare(self.calls, limits.calls, "calls")
        return self.exceeded

    def _compare(self, spent: float, limit: float, unit: str) -> None:
        if spent >= limit:
            self.exceeded = f"{spent:.6g} of {limit:.6g} {unit}"
