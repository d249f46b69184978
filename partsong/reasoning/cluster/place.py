"""The driver's side of one actor: the calls it has, and a thread that fetches what there is to tell of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from partsong.reasoning.calls.call import Completion, Request
from partsong.reasoning.calls.engine import EngineError, Progress
from partsong.reasoning.cluster.host import HostReport

__all__ = ["PlacedCall", "Cluster", "LostError", "EnginePlace", "in_loop", "said"]


class LostError(EngineError):
    """The actor that had a call is gone; another may answer it."""


@dataclass(slots=True, eq=False)
class PlacedCall:
    """A request at an actor, and the way back to the loop that waits for it.

    Attributes:
        number: tells it apart; one that is asked again has a new one.
        request: what is asked.
        future: for the completion.
        left: set once the actor does no more for it.
        progress: told of new text.
        lost: tokens that attempts before this one had written.
        tokens: written by this one so far.
    """

    number: int
    request: Request
    future: asyncio.Future[Completion]
    left: asyncio.Event
    progress: Progress | None
    lost: int = 0
    tokens: int = 0

    def take(self, news: HostReport) -> None:
        """In the loop: tells report by report, as if the engine were here, so that a halt falls on the same token."""
        for report in news.reports:
            if self.future.done():  # halted or cancelled by the last one
                break
            self.tokens = report.tokens
            if self.progress is not None:
                tokens = self.lost + report.tokens
                self.progress(report.text, tokens, report.confidence, restart=report.restart)
        if news.end is not None:
            self.deliver(news.end)

    def deliver(self, end: Completion | Exception) -> None:
        """In the loop: ends the call."""
        self.left.set()
        if self.future.done():
            return
        if isinstance(end, Completion):
            self.future.set_result(end)
        else:
            self.future.set_exception(end)


class Cluster:
    """The cluster this process is connected to now.

    Attributes:
        address: of its head.
    """

    def __init__(self) -> None:
        import ray

        self.address = ray.get_runtime_context().gcs_address

    @property
    def there(self) -> bool:
        """Whether this process is still connected to it; else Ray would start another one at the next call."""
        import ray

        return ray.is_initialized() and ray.get_runtime_context().gcs_address == self.address


class EnginePlace:
    """One of the engines of a `RayEngine`. Its actor may die; then its calls are lost, and another may take its place.

    Args:
        number: of the place.
        new_actor: starts an actor of `Host`.
        cluster: where it is.
        restarts: most actors that may follow the first.
        lock: held where calls come and go, shared by all places.
        changed: called whenever an actor has come up or gone.

    Attributes:
        state: "starting", "up" or "down".
        calls: the actor's, by number.
        where: process and machine of the actor.
        why: what ended the last actor; "" where none has ended.
    """

    def __init__(
        self,
        number: int,
        new_actor: Callable[[], Any],
        cluster: Cluster,
        restarts: int,
        lock: threading.RLock,
        changed: Callable[[], None],
    ) -> None:
        self.number, self.restarts = number, restarts
        self._new_actor, self._cluster, self._lock, self._changed = new_actor, cluster, lock, changed
        self.state: Literal["starting", "up", "down"] = "starting"
        self.calls: dict[int, PlacedCall] = {}
        self.where, self.why, self._closing = "", "", False
        self.actor = new_actor()
        self.start = self.actor.start.remote()
        self._thread = threading.Thread(target=self._run, name=f"partsong-ray-{number}", daemon=True)

    def __str__(self) -> str:
        return f"engine {self.number} ({self.where or 'not started'}): {self.why or self.state}"

    def open(self, where: str) -> None:
        """The actor's engine is there: calls may come."""
        self.state, self.where = "up", where
        self._thread.start()

    def submit(self, call: PlacedCall) -> None:
        """Hands a call to the actor; under the lock."""
        self.calls[call.number] = call
        self.actor.submit.remote(call.number, call.request)

    def cancel(self, call: PlacedCall) -> None:
        """Nobody waits for a call any more; `PlacedCall.left` tells when the actor has let it go."""
        with self._lock:
            if call.number in self.calls and self._cluster.there:
                self.actor.cancel.remote(call.number)

    def close(self) -> None:
        """Ends the actor and the thread; calls under way get an `EngineError`."""
        import ray

        self._closing = True
        if self._cluster.there:
            ray.kill(self.actor)
        if self._thread.is_alive():
            self._thread.join()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        import ray

        while True:
            try:
                if not self._cluster.there:
                    raise EngineError("Ray was shut down")
                if self.state == "starting":
                    self.where = ray.get(self.start)[1]
                    self.state = "up"
                    self._changed()
                self._tell(ray.get(self.actor.news.remote()))
            except BaseException as error:  # noqa: BLE001 - Ray may end threads by SystemExit; nobody is left waiting
                if not self._next(error):
                    return

    def _tell(self, told: Mapping[int, HostReport]) -> None:
        with self._lock:
            pairs = [(self.calls[number], news) for number, news in told.items() if number in self.calls]
            for call, news in pairs:
                if news.end is not None:
                    del self.calls[call.number]
        for call, news in pairs:
            in_loop(call.future.get_loop(), call.take, news)

    def _next(self, error: BaseException) -> bool:
        """After the end of an actor: loses its calls, and starts another where that is still allowed."""
        import ray

        with self._lock:
            lost, self.calls = list(self.calls.values()), {}
            self.why = said(error)
            if self._cluster.there:
                ray.kill(self.actor)  # it may be out of reach rather than dead, and would go on for nobody
            again = self._cluster.there and bool(self.restarts) and not self._closing
            if again:
                self.restarts -= 1
                self.state, self.actor = "starting", self._new_actor()
                self.start = self.actor.start.remote()
            else:
                self.state = "down"
        self._lose(lost)
        self._changed()
        return again

    def _lose(self, calls: Iterable[PlacedCall]) -> None:
        for call in calls:
            error = LostError(f"the call was under way on {self}")
            if self._closing:
                error = EngineError("the engine was closed while this call was under way")
            in_loop(call.future.get_loop(), call.deliver, error)


def said(error: BaseException) -> str:
    """The end of what an error says, in one line: Ray begins with what the actor was."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else repr(error))[:300]


def in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Calls a function in a loop; where the loop is closed nobody waits."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
