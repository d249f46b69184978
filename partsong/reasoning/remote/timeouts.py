"""Says how long a remote call may take, and how often it is tried."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated

from partsong.knobs import AboveZero, Knobs, Whole

__all__ = ["Patience"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience(Knobs):
    """Holds timeouts in seconds, and a number of retries.

    Attributes:
        connect: longest time until there is a connection.
        first: longest time from sending until the first piece of an answer; a server that queues calls answers late.
        stall: longest time between two pieces of an answer.
        total: longest time of a call with all its attempts and pauses.
        retries: most times a failed call is sent again.
        backoff: length of the first pause. Each further pause is twice as long, up to `longest`. Up to as much again is
            added at random, so that calls that failed together are not retried together. A pause the server asks for
            (``Retry-After``) counts instead, as long as `total` has room for it.
        longest: longest pause, before the random part.

    >>> Patience(stall=30.0).validate()
    """

    connect: AboveZero = 10.0
    first: AboveZero = 600.0
    stall: AboveZero = 60.0
    total: AboveZero = 3600.0
    retries: Annotated[int, Whole(0)] = 4
    backoff: AboveZero = 0.5
    longest: AboveZero = 8.0

    def pause(self, attempt: int, asked: float | None, draw: random.Random) -> float:
        """Returns the seconds to wait after a failed attempt.

        Args:
            attempt: number of the attempt; the first is 1.
            asked: the pause that the server requested, or None.
            draw: spreads calls that failed together.

        >>> Patience(backoff=1.0).pause(1, 30.0, random.Random(0)) > 30.0
        True
        """
        if asked is not None:
            return asked + self.backoff * draw.random()
        return min(self.backoff * 2 ** min(attempt - 1, 30), self.longest) * (1 + draw.random())
