"""Lets requests wait for something that is starting, such as the process of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Arrivals"]

T = TypeVar("T")


class Arrivals:
    """Holds the requests that wait for one thing.

    Attributes:
        num: how many wait.
    """

    def __init__(self) -> None:
        self.num = 0
        self._next = asyncio.Event()

    def note(self) -> None:
        """Lets everybody who waits look again."""
        event, self._next = self._next, asyncio.Event()
        event.set()

    async def wait(self, find: Callable[[], T | None], seconds: float) -> T:
        """Waits until something is there; returns it.

        Args:
            find: looks for it; None where it is not there yet. What it raises ends the wait.
            seconds: the longest wait.

        Raises:
            TimeoutError: it did not come in time.
        """
        self.num += 1
        try:
            async with asyncio.timeout(seconds):
                while (arrived := find()) is None:
                    await self._next.wait()
                return arrived
        finally:
            self.num -= 1
