"""Runs many copies of one engine as a `RayEngine` on the machines of a Ray cluster."""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from partsong.errors import ArgumentError
from partsong.knobs import Count, Number, Whole, check_knobs, type_hints
from partsong.reasoning.calls.call import Completion, Request
from partsong.reasoning.calls.engine import Engine, EngineError, Progress
from partsong.reasoning.calls.waiter import in_loop
from partsong.reasoning.cluster.joining import import_ray, join_cluster
from partsong.reasoning.cluster.place import Cluster, EnginePlace, last_line
from partsong.reasoning.cluster.placement import Placement, gpu_share
from partsong.reasoning.hosted.host import Host, make_local, place_of
from partsong.reasoning.hosted.placed_call import PlacedCall, ask_until_answered

__all__ = ["RayEngine"]

#: Seconds engines have to close before their processes are ended.
_GRACE = 5.0

Amount = Annotated[float, Number(0.0)]


class RayEngine:
    """Spreads calls over identical engines, each in an actor of its own.

    A call goes to the least busy engine. Calls of one prompt go to the same engine as long as that is at most four
    calls ahead of the least busy, so that they share the prompt's keys. If an actor dies, its calls are asked again
    elsewhere, with the same seeds. An engine whose answers depend only on the request, such as `LocalEngine` in
    float64, then answers as if nothing had happened. Tokens that the dead actor had reported are in `Usage.wasted`.

    Reports of progress come in order and one by one, gathered for about 10 ms. Halting and budgets work as with the
    engine itself, and tokens written in the meantime are lost.

    Args:
        model: model of a `LocalEngine` in each actor: a folder that every machine of the cluster has under the same
            path, a zoo name, "smollm2-135m", or a hub id.
        factory: makes an engine, instead of `model`. It is called in each actor, so it has to be a function of a module
            the actors can import, or small enough to be pickled.
        num_engines: number of engines.
        num_cpus: cores of each engine; torch takes as many threads there.
        num_gpus: GPUs of each engine; a fraction shares one. None gives each engine one GPU, or a share where the
            cluster has fewer GPUs than engines, or 0 where it has no GPU.
        restarts: most replacements of dead actors, for each engine.
        start_seconds: longest time until all engines are loaded.
        address: address of the cluster; "auto" takes the one that runs on this machine. None takes the one this process
            is connected to, or ``RAY_ADDRESS``, or starts one on this machine only, which ends with `close`.
        name: name in journals. None takes the engines' own, so that a run goes on with one `LocalEngine` or many.
        **options: options of `LocalEngine`; ``dtype`` may be text, such as "float64".

    Attributes:
        name: name in journals.

    Raises:
        ArgumentError: a number is out of range, both or neither of `model` and `factory` are given, or the engines
            refuse their options.
        EngineError: not all engines started.
        UnsupportedError: Ray is not installed.

    >>> from partsong.reasoning import Message
    >>> async def ask():
    ...     engine = RayEngine("sums", num_engines=2, dtype="float64")
    ...     completion = await engine.generate(Request(messages=(Message("user", ("37+48-19*3=?",)),)))
    ...     await engine.close()
    ...     return completion.text
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        factory: Callable[[], Engine] | None = None,
        num_engines: Count = 2,
        num_cpus: Amount = 1.0,
        num_gpus: Amount | None = None,
        restarts: Annotated[int, Whole(0)] = 1,
        start_seconds: Amount = 600.0,
        address: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        make = _maker(model, factory, options)
        sizes = {"num_engines": num_engines, "num_cpus": num_cpus, "num_gpus": num_gpus, "restarts": restarts}
        check_knobs(type_hints(RayEngine.__init__), {**sizes, "start_seconds": start_seconds})
        ray = import_ray()
        self._own = join_cluster(address)
        self._lock, self._closed = threading.RLock(), False
        self._numbers, self._placement = itertools.count(), Placement()
        self._waiting: list[asyncio.Future[None]] = []
        self._places: list[EnginePlace] = []
        self._cluster = Cluster()
        atexit.register(self._end)  # runs before Ray and its threads end
        try:
            has = ray.cluster_resources()
            share = gpu_share(num_engines, has.get("GPU", 0.0)) if num_gpus is None else num_gpus
            if self._own:
                _check_room(num_engines, num_cpus, share, has)
            needs = {"num_cpus": num_cpus, "num_gpus": share, "scheduling_strategy": "SPREAD"}
            new_actor = functools.partial(ray.remote(Host).options(**needs).remote, make)
            for number in range(num_engines):
                self._places.append(EnginePlace(number, new_actor, self._cluster, restarts, self._lock, self._wake))
            engines_name = self._wait_for_start(ray, start_seconds)
        except BaseException:
            self._end()
            raise
        self.name = name or engines_name

    def _wait_for_start(self, ray: Any, seconds: float) -> str:
        """Waits for all engines; returns the name they share."""
        starts = [place.start for place in self._places]
        _, late = ray.wait(starts, num_returns=len(starts), timeout=seconds)
        if late:
            free, of = _counts(ray.available_resources()), _counts(ray.cluster_resources())
            raise EngineError(
                f"{len(late)} of {len(starts)} engines were not there after start_seconds={seconds:g}; {free} of {of} "
                f"are free: ask for fewer engines, or for less for each (num_cpus, num_gpus)"
            )
        names = []
        for place in self._places:
            try:
                name, where = ray.get(place.start)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, Exception):  # the engine's own refusal
                    raise error.cause from None
                raise EngineError(f"engine {place.number} could not be made: {last_line(error)}") from error
            except ray.exceptions.RayError as error:
                raise EngineError(f"engine {place.number} ended while it was loaded: {last_line(error)}") from error
            names.append(name)
            place.open(where)
        if len(set(names)) > 1:
            raise ArgumentError(
                f"the factory made engines named {', '.join(sorted(set(names)))}; it must always make the same engine"
            )
        return names[0]

    # --- calls --------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        """Answers one request; see `Engine`.

        Cancelling ends the call in its actor, and returns when the actor has dropped it.

        Raises:
            EngineError: no engine is left, three engines died during the call, or the engine is closed. Errors of the
                engines themselves are raised as well.
        """
        return await ask_until_answered(request, progress, self._numbers, self._assign, "engines")

    async def _assign(self, call: PlacedCall) -> EnginePlace:
        """Gives a call to an engine; waits while all of them are being restarted."""
        while True:
            with self._lock:
                if self._closed:
                    raise EngineError("the engine is closed: make a new one")
                if not self._cluster.there:
                    raise EngineError("Ray was shut down, and the engine with it: make a new one")
                loads = {place.number: len(place.calls) for place in self._places if place.state == "up"}
                if loads:
                    place = self._places[self._placement.choose(loads, call.request)]
                    place.submit(call)
                    return place
                if all(place.state == "down" for place in self._places):
                    raise EngineError(f"no engine is left: {'; '.join(map(str, self._places))}")
                change = asyncio.get_running_loop().create_future()
                self._waiting.append(change)
            await change

    def _wake(self) -> None:
        """Wakes all calls that wait for an engine, because one has started or ended."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for change in waiting:
            in_loop(change.get_loop(), lambda change=change: change.done() or change.set_result(None))

    # --- the end ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Ends the actors, and the cluster if this engine has started it; running calls get an `EngineError`.

        Close it before ``ray.shutdown()``: Ray ends a process whose threads ask for something after that. At the end of
        the process it is closed by itself. Closing twice does nothing.
        """
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        ray = import_ray()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._end)
        if self._cluster.there:
            ends = [place.actor.close.remote() for place in self._places if place.state == "up"]
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=_GRACE)
        for place in self._places:
            place.close()
        self._wake()
        if self._own and self._cluster.there:
            ray.shutdown()


def _maker(
    model: str | Path | None, factory: Callable[[], Engine] | None, options: dict[str, Any]
) -> Callable[[], Engine]:
    if (model is None) == (factory is None):
        raise ArgumentError("a RayEngine needs model= or factory=; give one of the two")
    if factory is not None:
        if options:
            raise ArgumentError(f"{', '.join(options)}: these are for model=; a factory sets its engine's own options")
        return factory
    assert model is not None
    return functools.partial(make_local, place_of(model), options)


def _check_room(num_engines: int, num_cpus: float, num_gpus: float, has: dict[str, float]) -> None:
    """Refuses engines that have no room in a cluster that this engine started, because that does not grow."""
    for kind, each in (("CPU", num_cpus), ("GPU", num_gpus)):
        if each * num_engines > has.get(kind, 0.0) + 1e-9:
            raise ArgumentError(
                f"{num_engines} engines of num_{kind.lower()}s={each:g} need {each * num_engines:g} {kind}s, and this "
                f"machine has {has.get(kind, 0.0):g}: ask for fewer engines, or for less for each"
            )


def _counts(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0.0):g} CPUs and {resources.get('GPU', 0.0):g} GPUs"
