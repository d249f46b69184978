"""What runs in an actor: an engine, its calls, and what there is to tell of them until somebody fetches it."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partsong.errors import ArgumentError, PartsongError
from partsong.reasoning.calls.call import Completion, Request
from partsong.reasoning.calls.engine import Engine, EngineError

__all__ = ["Host", "HostReport", "Report", "make_local"]

#: Seconds that news wait for more, so that what comes together travels together.
_GATHER = 0.01


@dataclass(frozen=True, slots=True)
class Report:
    """What an engine told while a call ran; see `Progress`."""

    text: str
    tokens: int
    confidence: tuple[float, ...] = ()
    restart: bool = False


@dataclass(slots=True)
class HostReport:
    """What has happened to a call since it was last asked for.

    Attributes:
        reports: in order.
        end: what came of it; None while it runs.
    """

    reports: list[Report] = field(default_factory=list)
    end: Completion | Exception | None = None


class Host:
    """An actor's side of `RayEngine`.

    Args:
        make: gives the engine.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._engine: Engine | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._gone: set[int] = set()
        self._news: dict[int, HostReport] = {}
        self._told = asyncio.Event()

    async def start(self) -> tuple[str, str]:
        """Makes the engine; returns its name, and where this is."""
        self._engine = self._make()
        return self._engine.name, f"process {os.getpid()} on {socket.gethostname()}"

    async def submit(self, number: int, request: Request) -> None:
        """Begins a call; `news` tells what comes of it."""
        if number in self._gone:
            self._gone.discard(number)
            self._end(number, EngineError("the call was cancelled"))
            return
        self._tasks[number] = asyncio.ensure_future(self._answer(number, request))

    async def cancel(self, number: int) -> None:
        """Ends a call; `news` tells when the engine has let it go."""
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()
        else:
            # It may have overtaken the call. If that has ended instead, its number stays here, which is little.
            self._gone.add(number)

    async def news(self) -> Mapping[int, HostReport]:
        """Waits until there is something to tell; returns it by number of the call."""
        await self._told.wait()
        await asyncio.sleep(_GATHER)
        self._told.clear()
        told, self._news = self._news, {}
        return told

    async def close(self) -> None:
        """Closes the engine."""
        if self._engine is not None:
            await self._engine.close()

    async def _answer(self, number: int, request: Request) -> None:
        assert self._engine is not None
        try:
            end: Completion | Exception = await self._engine.generate(request, functools.partial(self._report, number))
        except asyncio.CancelledError:
            end = EngineError("the call was cancelled")
        except Exception as error:  # noqa: BLE001 - whatever an engine raises, nobody may be left waiting
            end = _portable(error)
        self._tasks.pop(number, None)
        self._end(number, end)

    def _report(
        self, number: int, text: str, tokens: int, confidence: Sequence[float] = (), *, restart: bool = False
    ) -> None:
        self._of(number).reports.append(Report(text, tokens, tuple(confidence), restart))

    def _end(self, number: int, end: Completion | Exception) -> None:
        self._of(number).end = end

    def _of(self, number: int) -> HostReport:
        self._told.set()
        return self._news.setdefault(number, HostReport())


def _portable(error: Exception) -> Exception:
    """An error that can be read where the engine's packages may be missing: one of ours, or its description."""
    if isinstance(error, PartsongError) and type(error).__module__.startswith("partsong."):
        return error
    return EngineError(f"the engine failed: {error!r}")


def make_local(model: str, options: Mapping[str, Any]) -> Engine:
    """A `LocalEngine`; its dtype may be the name of one, such as "float64".

    Raises:
        ArgumentError: a dtype that torch does not know.
    """
    import torch

    from partsong.reasoning.local import LocalEngine

    dtype = options.get("dtype")
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ArgumentError(f"dtype={dtype!r}; use a floating type of torch such as 'bfloat16'")
        options = {**options, "dtype": found}
    return LocalEngine(model, **options)
