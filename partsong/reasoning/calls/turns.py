"""The order in which the calls of a journal ended: a replay hands them out in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

__all__ = ["Turns"]

#: Seconds without a turn or a call under way after which those that wait are no longer kept for one nobody asks for.
PATIENCE = 10.0


class Turns:
    """Places that are called up one after another.

    A run that goes on may ask otherwise than it did: a server that draws anew leads it elsewhere, and a place of before
    is never asked for. The others wait for it a while and then go on without it.

    Args:
        places: in order.
    """

    def __init__(self, places: Iterable[int]) -> None:
        self._left = list(reversed(list(places)))
        self._moved = asyncio.Condition()
        self._waiting: set[int] = set()

    async def wait(self, place: int, idle: Callable[[], bool] = lambda: True) -> None:
        """Returns when all lower places have had their turn, and gives the turn to the next.

        Args:
            place: whose turn is waited for.
            idle: whether nothing is under way that may still ask for a lower place.
        """
        self._waiting.add(place)
        try:
            async with self._moved:
                while not self._is_next(place):
                    before = len(self._left)
                    try:
                        async with asyncio.timeout(PATIENCE):
                            await self._moved.wait()
                    except TimeoutError:
                        if len(self._left) == before and place == min(self._waiting) and idle():
                            self._pass_over(place)
        finally:
            self._waiting.discard(place)
            await self._leave(place)

    async def _leave(self, place: int) -> None:
        """Takes a place off the list, also where whoever waited was cancelled."""
        async with self._moved:
            if place in self._left:
                self._left.remove(place)
            self._moved.notify_all()

    def _is_next(self, place: int) -> bool:
        return not self._left or self._left[-1] >= place

    def _pass_over(self, place: int) -> None:
        while not self._is_next(place):
            self._left.pop()
