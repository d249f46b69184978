"""The order in which the calls of a journal ended: a replay hands them out in it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

__all__ = ["Turns"]


class Turns:
    """Places that are called up one after another.

    Args:
        places: in order.
    """

    def __init__(self, places: Iterable[int]) -> None:
        self._left = list(reversed(list(places)))
        self._moved = asyncio.Condition()

    async def wait(self, place: int) -> None:
        """Returns when all lower places have had their turn, and gives the turn to the next."""
        async with self._moved:
            await self._moved.wait_for(lambda: not self._left or self._left[-1] >= place)
            if self._left and self._left[-1] == place:
                self._left.pop()
            self._moved.notify_all()
