"""Runs code under a clock that jumps: waiting takes no time, so an hour of calls is simulated in a moment.

It is for simulated engines, such as `ScriptedEngine`. Nothing else in a program under this loop may wait for external
events.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

__all__ = ["VirtualLoop", "run_virtual"]


class _JumpingSelector(selectors.SelectSelector):
    """Advances the clock of the loop by the requested waiting time, and returns at once."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self.loop.now += timeout
        if not ready and timeout is None:
            raise RuntimeError("every task waits for another one, so nothing will ever happen")
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs tasks under a clock that jumps; `now` counts the seconds since the loop was made."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Returns the time of the loop's clock."""
        return self.now


def run_virtual(main: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
    """Runs a coroutine to its end; returns its result, and the seconds that passed inside.

    >>> run_virtual(asyncio.sleep(3600, "done"))
    ('done', 3600.0)
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        return runner.run(main), loop.time()
