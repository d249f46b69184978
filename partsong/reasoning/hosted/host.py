"""Runs an engine for another process: makes its calls, and keeps their reports until that process fetches them."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError, ArgumentTypeError, PartsongError
from partsong.reasoning.calls.call import Completion, Request
from partsong.reasoning.calls.engine import Engine, EngineError

__all__ = ["Host", "HostReport", "Report", "make_local", "place_of"]

#: Seconds that reports wait for more, so that they are sent together.
_GATHER = 0.01


@dataclass(frozen=True, slots=True)
class Report:
    """Holds one report of an engine on a running call; see `Progress`."""

    text: str
    tokens: int
    confidence: tuple[float, ...] = ()
    restart: bool = False


@dataclass(slots=True)
class HostReport:
    """Holds what has happened to a call since the driver last asked; it has no `end` while the call runs."""

    reports: list[Report] = field(default_factory=list)
    end: Completion | Exception | None = None


class Host:
    """Runs the engine that `make` returns in an actor of `RayEngine`, or on the first rank of `RanksEngine`."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._engine: Engine | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()
        self._news: dict[int, HostReport] = {}
        self._has_news = asyncio.Event()

    async def start(self) -> tuple[str, str]:
        """Makes the engine; returns its name, and the process and machine it runs on."""
        self._engine = self._make()
        return self._engine.name, f"process {os.getpid()} on {socket.gethostname()}"

    async def submit(self, number: int, request: Request, **how: Any) -> None:
        """Begins a call; `news` returns its reports. Further arguments are for the engine's `generate`."""
        if number in self._cancelled:
            self._cancelled.discard(number)
            self._end(number, EngineError("the call was cancelled"))
            return
        self._tasks[number] = asyncio.ensure_future(self._answer(number, request, how))

    async def cancel(self, number: int) -> None:
        """Ends a call; `news` reports when the engine has dropped it."""
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()
        else:
            # The cancellation may have overtaken the call. If the call has ended instead, only its number is kept.
            self._cancelled.add(number)

    async def news(self) -> Mapping[int, HostReport]:
        """Waits until there are reports; returns them by number of the call."""
        await self._has_news.wait()
        await asyncio.sleep(_GATHER)
        self._has_news.clear()
        news, self._news = self._news, {}
        return news

    async def close(self) -> None:
        """Closes the engine."""
        if self._engine is not None:
            await self._engine.close()

    async def _answer(self, number: int, request: Request, how: Mapping[str, Any]) -> None:
        assert self._engine is not None
        try:
            report = functools.partial(self._report, number)
            end: Completion | Exception = await self._engine.generate(request, report, **how)
        except asyncio.CancelledError:
            end = EngineError("the call was cancelled")
        except Exception as error:  # noqa: BLE001 - an engine may raise any error, and no caller may be left waiting
            end = _portable(error)
        self._tasks.pop(number, None)
        self._end(number, end)

    def _report(
        self, number: int, text: str, tokens: int, confidence: Sequence[float] = (), *, restart: bool = False
    ) -> None:
        self._news_of(number).reports.append(Report(text, tokens, tuple(confidence), restart))

    def _end(self, number: int, end: Completion | Exception) -> None:
        self._news_of(number).end = end

    def _news_of(self, number: int) -> HostReport:
        self._has_news.set()
        return self._news.setdefault(number, HostReport())


def _portable(error: Exception) -> Exception:
    """Returns an error that can be read where the engine's packages are missing: partsong's own, or a description."""
    if isinstance(error, PartsongError) and type(error).__module__.startswith("partsong."):
        return error
    return EngineError(f"the engine failed: {error!r}")


def place_of(model: str | Path) -> str:
    """Returns what another process loads as this model; it may begin in another folder than this one.

    Raises:
        ArgumentTypeError: it is no folder or name.
    """
    if not isinstance(model, str | Path):
        raise ArgumentTypeError(f"model is a folder or a name, which each process loads; found {type(model).__name__}")
    return str(Path(model).resolve()) if Path(model).is_dir() else str(model)


def make_local(model: str, options: Mapping[str, Any]) -> Engine:
    """Makes a `LocalEngine`; its dtype may be given by name, such as "float64".

    Raises:
        ArgumentError: torch does not know the dtype.
    """
    import torch

    from partsong.reasoning.local import LocalEngine

    dtype = options.get("dtype")
    if isinstance(dtype, str):
        torch_dtype = getattr(torch, dtype, None)
        if not isinstance(torch_dtype, torch.dtype):
            raise ArgumentError(f"dtype={dtype!r}; use a floating type of torch such as 'bfloat16'")
        options = {**options, "dtype": torch_dtype}
    return LocalEngine(model, **options)
