"""Keeps the driver's side of one actor: the calls it has, and a thread that fetches their reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Literal

from partsong.reasoning.calls.engine import EngineError
from partsong.reasoning.calls.waiter import in_loop
from partsong.reasoning.hosted.placed_call import LostError, PlacedCall, hand_on

__all__ = ["Cluster", "EnginePlace", "last_line"]


class Cluster:
    """Identifies the cluster this process is connected to by the address of its head."""

    def __init__(self) -> None:
        import ray

        self.address = ray.get_runtime_context().gcs_address

    @property
    def there(self) -> bool:
        """Returns whether this process is still connected to it; otherwise the next call would start another one."""
        import ray

        return ray.is_initialized() and ray.get_runtime_context().gcs_address == self.address


class EnginePlace:
    """Keeps one of the engines of a `RayEngine`.

    If its actor dies, its calls are lost, and another actor may take its place.

    Its fields `where` and `why` name the process and machine of the actor, and what ended the last one. All places
    share `lock`, which is held while calls come and go. `on_change` is called when an actor has started or ended.
    """

    def __init__(
        self,
        number: int,
        new_actor: Callable[[], Any],
        cluster: Cluster,
        restarts: int,
        lock: threading.RLock,
        on_change: Callable[[], None],
    ) -> None:
        self.number, self.restarts = number, restarts
        self._new_actor, self._cluster, self._lock, self._on_change = new_actor, cluster, lock, on_change
        self.state: Literal["starting", "up", "down"] = "starting"
        self.calls: dict[int, PlacedCall] = {}
        self.where, self.why, self._closing = "", "", False
        self.actor = new_actor()
        self.start = self.actor.start.remote()
        self._thread = threading.Thread(target=self._run, name=f"partsong-ray-{number}", daemon=True)

    def __str__(self) -> str:
        return f"engine {self.number} ({self.where or 'not started'}): {self.why or self.state}"

    def open(self, where: str) -> None:
        """Opens the place for calls, once the actor's engine is ready."""
        self.state, self.where = "up", where
        self._thread.start()

    def submit(self, call: PlacedCall) -> None:
        """Hands a call to the actor; the caller holds the lock."""
        self.calls[call.number] = call
        self.actor.submit.remote(call.number, call.request)

    def cancel(self, call: PlacedCall) -> None:
        """Cancels a call; `PlacedCall.left` is set when the actor has dropped it."""
        with self._lock:
            if call.number in self.calls and self._cluster.there:
                self.actor.cancel.remote(call.number)

    def close(self) -> None:
        """Ends the actor and the thread; running calls get an `EngineError`."""
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
                    self._on_change()
                hand_on(self.calls, self._lock, ray.get(self.actor.news.remote()))
            except BaseException as error:  # noqa: BLE001 - Ray may end threads by SystemExit; no call is left waiting
                if not self._restart(error):
                    return

    def _restart(self, error: BaseException) -> bool:
        """Gives up the calls of an actor that has ended; starts another actor and returns whether that is allowed."""
        import ray

        with self._lock:
            lost, self.calls = list(self.calls.values()), {}
            self.why = last_line(error)
            if self._cluster.there:
                ray.kill(self.actor)  # it may be unreachable rather than dead, and would work for nothing
            again = self._cluster.there and bool(self.restarts) and not self._closing
            if again:
                self.restarts -= 1
                self.state, self.actor = "starting", self._new_actor()
                self.start = self.actor.start.remote()
            else:
                self.state = "down"
        self._lose(lost)
        self._on_change()
        return again

    def _lose(self, calls: Iterable[PlacedCall]) -> None:
        for call in calls:
            error = LostError(f"the call was under way on {self}")
            if self._closing:
                error = EngineError("the engine was closed while this call was under way")
            in_loop(call.loop, call.deliver, error)


def last_line(error: BaseException) -> str:
    """Returns the last line of an error's message, because Ray describes the actor before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else repr(error))[:300]
