"""Waits for tasks in the order in which they end, and cancels them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, TypeVar

from partsong.reasoning.calls.budget import BudgetError

__all__ = ["as_they_end", "cancel_all"]

T = TypeVar("T")


async def as_they_end(tasks: Sequence[asyncio.Task[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields number and result of each task in the order of ending, without those that the budget ended."""
    ended: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    numbers = {task: number for number, task in enumerate(tasks)}
    for task in tasks:
        task.add_done_callback(ended.put_nowait)
    for _ in tasks:
        task = await ended.get()
        with contextlib.suppress(BudgetError):
            yield numbers[task], task.result()


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels the tasks that still run and waits until they have ended."""
    pending = list(tasks)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
