"""Decodes several texts in one thread, a step of each in turn."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from partsong.errors import PartsongError
from partsong.serving.texts.rank_turns import RankTurns, TurnOrder

__all__ = ["StepTurns"]

Steps = Generator[Any, None, Any]

_LOG = logging.getLogger(__name__)
#: Seconds after which ranks that wait for a text hear that the first one is there.
_PULSE = 30.0


@dataclass(eq=False, slots=True)
class _Turn:
    """Holds a text that is being decoded, and the task that waits for it."""

    number: int
    begins: Any
    steps: Steps
    on_step: Callable[[Any], None]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    left: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False

    def step(self, step: Any) -> None:
        if not self.cancelled and not self.future.done():
            self.on_step(step)

    def leave(self, value: Any, error: BaseException | None) -> None:
        self.left.set()
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


class StepTurns:
    """Runs generators in a thread of its own, one step of each in turn, so a long text does not hold up a short one.

    Every model forward happens in that thread, because two threads that share the cores make each other slow.

    Args:
        ranks: tells other ranks of every step before it; None where this process has the whole model.

    >>> def count(last):
    ...     yield from range(last)
    ...     return "done"
    >>> async def main():
    ...     turns, seen = StepTurns(), []
    ...     value = await turns.run(count(2), seen.append)
    ...     turns.close()
    ...     return seen, value
    >>> asyncio.run(main())
    ([0, 1], 'done')
    """

    def __init__(self, ranks: RankTurns | None = None) -> None:
        self._ranks, self._numbers = ranks, itertools.count()
        self._wake = threading.Condition()
        self._turns: deque[_Turn] = deque()
        self._closing = False
        # torch's number of threads is per thread; the caller's setting should hold here, too.
        self._cores = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    async def run(self, steps: Steps, on_step: Callable[[Any], None], begins: Any = None) -> Any:
        """Runs a generator to its end and returns its value; cancelling ends it before its next step.

        Args:
            steps: the generator. Its errors are raised here.
            on_step: called in the loop of the caller with every step.
            begins: what other ranks make the same generator of.
        """
        loop = asyncio.get_running_loop()
        turn = _Turn(next(self._numbers), begins, steps, on_step, loop, loop.create_future())
        with self._wake:
            self._turns.append(turn)
            self._wake.notify()
        try:
            return await turn.future
        except asyncio.CancelledError:
            turn.cancelled = True
            await turn.left.wait()
            raise

    def close(self) -> None:
        """Ends the thread after the step it is in."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._cores)
        begun = set[int]()
        while (turn := self._next()) is not None:
            value, error, ended = None, None, turn.cancelled
            try:
                self._tell(turn, ended, begun)
                if ended:
                    turn.steps.close()
                else:
                    turn.loop.call_soon_threadsafe(turn.step, next(turn.steps))
            except StopIteration as end:
                value, ended = end.value, True
            except Exception as failure:  # noqa: BLE001 - whoever waits must learn of any error, and the others go on
                error, ended = failure, True
            if ended:
                turn.loop.call_soon_threadsafe(turn.leave, value, error)
            else:
                with self._wake:
                    self._turns.append(turn)

    def _tell(self, turn: _Turn, leaves: bool, begun: set[int]) -> None:
        """Lets other ranks do with a text what is done with it here."""
        if self._ranks is None or (leaves and turn.number not in begun):
            return
        begins = None if turn.number in begun else turn.begins
        begun.add(turn.number)
        self._share(TurnOrder(turn.number, begins, leaves))

    def _share(self, order: TurnOrder) -> None:
        if self._ranks is None:
            return
        try:
            self._ranks.share(order)
        except PartsongError:  # ranks are gone, and this one cannot go on without them
            _LOG.exception("a rank is gone")
            os._exit(1)

    def _next(self) -> _Turn | None:
        """Waits for the text whose turn it is; returns None once this is closed."""
        while True:
            with self._wake:
                if not self._turns and not self._closing:
                    self._wake.wait(None if self._ranks is None else _PULSE)
                if self._closing:
                    break
                if self._turns:
                    return self._turns.popleft()
            self._share(TurnOrder())  # nothing to do, but this rank is there
        self._share(TurnOrder(ends=True))
        return None
