"""How long a remote call may take, and how often it is tried."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields

from partsong.errors import ArgumentError

__all__ = ["Patience"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Seconds, and a number of retries.

    Attributes:
        connect: until a connection stands.
        first: from sending until the first piece of an answer; a server that queues calls answers late.
        stall: between two pieces of an answer.
        total: of a call, all its attempts and pauses included.
        retries: most times a failed call is sent again.
        backoff: of the first pause; each further one is twice as long, up to `longest`, with up to as much again at
            random, so that calls that failed together do not come back together. A pause the server asks for
            (``Retry-After``) counts instead, however long, as long as `total` has room for it.
        longest: see `backoff`.

    >>> Patience(stall=30.0).validate()
    """

    connect: float = 10.0
    first: float = 600.0
    stall: float = 60.0
    total: float = 3600.0
    retries: int = 4
    backoff: float = 0.5
    longest: float = 8.0

    def validate(self) -> None:
        """Refuses what cannot be waited.

        Raises:
            ArgumentError: seconds that are not positive, or retries that are no count.
        """
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ArgumentError(f"patience retries={self.retries!r}; use 0 or a positive integer")
        for name in (field.name for field in fields(self) if field.name != "retries"):
            value = getattr(self, name)
            if isinstance(value, bool) or not value > 0 or math.isnan(value):
                raise ArgumentError(f"patience {name}={value!r}; use a positive number of seconds")

    def pause(self, attempt: int, asked: float | None, draw: random.Random) -> float:
        """Seconds to wait after a failed attempt.

        Args:
            attempt: which it was; the first is 1.
            asked: what the server asked for; None where it did not say.
            draw: spreads calls that failed together.

        >>> Patience(backoff=1.0).pause(1, 30.0, random.Random(0)) > 30.0
        True
        """
        if asked is not None:
            return asked + self.backoff * draw.random()
        return min(self.backoff * 2 ** min(attempt - 1, 30), self.longest) * (1 + draw.random())
