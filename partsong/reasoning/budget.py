"""What a run may spend, and the error of having spent it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from partsong.errors import ArgumentError, PartsongError

__all__ = ["Budget", "BudgetError", "Price"]


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
        calls: begun; those that a journal held do not count.
        seconds: since the run began.
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

    def spent(self, *, tokens: int, calls: int, seconds: float, money: float) -> str | None:
        """What is used up, in words; None while there is some of everything left."""
        for name, found in (("tokens", tokens), ("calls", calls), ("seconds", seconds), ("money", money)):
            limit = getattr(self, name)
            if limit is not None and found >= limit:
                return f"{found:.6g} of {limit:.6g} {name}"
        return None
