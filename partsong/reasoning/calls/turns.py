"""Keeps the order in which the calls of a journal ended, so that a replay returns them in that order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

__all__ = ["Turns"]

#: Seconds without a turn or a running call after which waiting calls stop waiting for one that was never requested.
TIMEOUT = 10.0


class Turns:
    """Gives turns to places one after another, in order.

    A resumed run may make other calls than before: new draws of a server may lead it elsewhere, and then a place of the
    earlier run is never requested. The others wait for it a while and then continue without it.
    """

    def __init__(self, places: Iterable[int]) -> None:
        self._left = list(reversed(list(places)))
        self._moved = asyncio.Condition()
        self._waiting: set[int] = set()

    async def wait(self, place: int, idle: Callable[[], bool] = lambda: True) -> None:
        """Returns when all lower places have had their turn, and gives the turn to the next.

        No place is skipped before `idle` confirms that nothing is running that may still request a lower one.
        """
        self._waiting.add(place)
        try:
            async with self._moved:
                while not self._is_next(place):
                    before = len(self._left)
                    try:
                        async with asyncio.timeout(TIMEOUT):
                            await self._moved.wait()
                    except TimeoutError:
                        if len(self._left) == before and place == min(self._waiting) and idle():
                            self._pass_over(place)
        finally:
            self._waiting.discard(place)
            await self._leave(place)

    async def _leave(self, place: int) -> None:
        """Takes a place off the list, also if the call that waited was cancelled."""
        async with self._moved:
            if place in self._left:
                self._left.remove(place)
            self._moved.notify_all()

    def _is_next(self, place: int) -> bool:
        return not self._left or self._left[-1] >= place

    def _pass_over(self, place: int) -> None:
        while not self._is_next(place):
            self._left.pop()
