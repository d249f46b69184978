"""Runs the ranks of a `RanksEngine` once, from their start to their end, and takes calls there and back."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from partsong.errors import DistributedError, PartsongError
from partsong.reasoning.calls.engine import EngineError
from partsong.reasoning.calls.waiter import in_loop
from partsong.reasoning.hosted.host import HostReport
from partsong.reasoning.hosted.placed_call import LostError, PlacedCall, hand_on

if TYPE_CHECKING:
    from partsong.parallel import Strategy

__all__ = ["EngineFacts", "RanksLife"]

#: Seconds that ranks get to end by themselves.
_GRACE = 10.0


class EngineFacts(NamedTuple):
    """Says what the first rank's engine is called, and what its model takes."""

    name: str
    context: int
    vocab_size: int


class RanksLife:
    """Starts ranks, and stays with them until they end.

    Args:
        nproc: number of ranks.
        model: what they load.
        strategies: how they share it.
        options: further options of the engine.
        changed: is held while calls come and go, and notified when the ranks are ready or have ended.

    Attributes:
        state: whether the ranks can be asked.
        facts: of the engine; there once they can.
        has_answered: whether they could be asked at some time.
        error: why they ended; None while they run.
    """

    def __init__(
        self,
        nproc: int,
        model: str,
        strategies: tuple[Strategy, ...],
        options: dict[str, Any],
        changed: threading.Condition,
    ) -> None:
        self.state: Literal["starting", "up", "down"] = "starting"
        self.error: PartsongError | None = None
        self.has_answered = False
        self._calls: dict[int, PlacedCall] = {}
        self._changed, self._ends = changed, False
        self._key = os.urandom(32)
        self._listener = Listener(authkey=self._key)
        self._line: Connection | None = None
        self._sending = threading.Lock()
        work = (nproc, self._listener.address, self._key, model, strategies, options)
        self._threads = [
            threading.Thread(target=self._launch, args=work, name="ranks of a language model", daemon=True),
            threading.Thread(target=self._read, name="what the ranks say", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, call: PlacedCall, *, plain: bool) -> None:
        """Hands a call to the ranks; where they have ended it is lost. A plain one is read without chat template."""
        from partsong.reasoning.hosted.rank import ToRanks

        with self._changed:
            is_up = self.state == "up"
            if is_up:
                self._calls[call.number] = call
        if is_up:
            self._send(ToRanks("begin", call.number, call.request, plain))
        else:
            in_loop(call.loop, call.deliver, LostError("the ranks have ended"))

    def cancel(self, call: PlacedCall) -> None:
        """Cancels a call; `PlacedCall.left` is set once the ranks have dropped it."""
        from partsong.reasoning.hosted.rank import ToRanks

        self._send(ToRanks("cancel", call.number))

    def end(self) -> None:
        """Ends the ranks, and waits for that; those that are still starting end once they have started."""
        self._ends = True
        self._ask_for_the_end()
        for thread in self._threads:
            thread.join(_GRACE)

    def _ask_for_the_end(self) -> None:
        from partsong.reasoning.hosted.rank import ToRanks

        self._send(ToRanks("end"))

    def _send(self, message: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # they have ended; another thread reports the cause
            if self._line is not None:
                self._line.send(message)

    def _launch(self, nproc: int, *work: Any) -> None:
        """Runs the ranks; their end ends all calls."""
        from partsong.parallel.ranks.launch import launch
        from partsong.reasoning.hosted.rank import serve_rank

        error: PartsongError = EngineError("the engine was closed while this call was under way")
        try:
            launch(serve_rank, nproc, *work)
        except PartsongError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001 - whatever kept the ranks from starting, callers must learn of it
            error = EngineError(f"the ranks could not be started: {caught!r}")
        finally:
            self._stop(error)
            # The thread that waits for the ranks' connection wakes up.
            with contextlib.suppress(OSError, EOFError, AuthenticationError), Client(work[0], authkey=self._key):
                pass

    def _stop(self, error: PartsongError) -> None:
        with self._changed:
            self.state, self.error = "down", error
            lost, self._calls = list(self._calls.values()), {}
            self._changed.notify_all()
        for call in lost:
            end = error if self._ends else LostError(f"the call was under way on ranks that ended: {error}")
            in_loop(call.loop, call.deliver, end)

    def _read(self) -> None:
        """Passes what the ranks report on to the loops that wait."""
        try:
            line = self._listener.accept()
        except (OSError, EOFError, AuthenticationError):
            return
        finally:
            self._listener.close()
        with contextlib.suppress(OSError, EOFError):
            self.facts = EngineFacts(*line.recv())
            with self._sending:
                self._line = line
            if self._ends:  # it was said before there was a line
                self._ask_for_the_end()
            with self._changed:
                if self.error is None:
                    self.state, self.has_answered = "up", True
                self._changed.notify_all()
            while True:
                self._take(line.recv())
        with self._sending:
            self._line = None
            line.close()

    def _take(self, news: Mapping[int, HostReport]) -> None:
        for report in news.values():
            if isinstance(report.end, DistributedError):
                report.end = None  # the ranks are about to end, and their end says that the call is lost
        hand_on(self._calls, self._changed, news)
