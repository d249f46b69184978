"""Which kernel computes an attention call.

A backend is a row: a name, `supports(q, k, v, bias) -> (ok, reason)` and a function. Rows are tried in order for the
device of q, and the specification (`naive`) takes what is left. To see why a call did not get a faster kernel, switch
logging of ``partsong.kernels`` to DEBUG: every choice and every refusal is logged once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels import cpu_flash, cuda, naive

__all__ = ["BACKENDS", "Backend", "available", "choose", "force_backend"]

_LOG = logging.getLogger("partsong.kernels")

#: Environment variable that forces a backend by name, as `force_backend` does; "auto" or empty leaves the choice free.
ENV = "PARTSONG_ATTENTION"


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One attention kernel.

    Attributes:
        name: what users force it by.
        usable: () -> (ok, reason): whether it can run on this machine at all.
        supports: (q, k, v, bias) -> (ok, reason) for inputs that are already checked and not empty.
        run: (q, k, v, bias, scale) -> (out, lse), keeping the contract of `partsong.kernels.attention`.
    """

    name: str
    usable: Callable[[], tuple[bool, str]]
    supports: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[bool, str]]
    run: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


_NAIVE = Backend(name="naive", usable=naive.usable, supports=naive.supports, run=naive.run)
_CPU_FLASH = Backend(name="cpu_flash", usable=cpu_flash.usable, supports=cpu_flash.supports, run=cpu_flash.run)
_CUDA = tuple(
    Backend(name=kernel.name, usable=kernel.usable, supports=kernel.supports, run=kernel.run)
    for kernel in (cuda.CUDNN, cuda.FLASH, cuda.EFFICIENT)
)

#: Every backend, fastest first.
BACKENDS: dict[str, Backend] = {row.name: row for row in (*_CUDA, _CPU_FLASH, _NAIVE)}

_BY_DEVICE: dict[str, tuple[Backend, ...]] = {"cpu": (_CPU_FLASH, _NAIVE), "cuda": (*_CUDA, _NAIVE)}
_FORCED: ContextVar[str | None] = ContextVar("partsong_attention", default=None)
_logged: set[tuple[str, str]] = set()


def choose(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Backend:
    """The backend that computes this call.

    Raises:
        ArgumentError: the environment variable names no backend.
        UnsupportedError: the forced backend cannot compute it.
    """
    forced = _FORCED.get() or os.environ.get(ENV)
    if forced and forced != "auto":
        row = _named(forced)
        ok, reason = row.supports(q, k, v, bias)
        if not ok:
            raise UnsupportedError(f"attention backend {row.name!r} was asked for but cannot do this: {reason}")
        _log_once(row.name, "chosen: asked for by name")
        return row
    for row in _BY_DEVICE.get(q.device.type, (_NAIVE,)):
        ok, reason = row.supports(q, k, v, bias)
        if (row.name, reason) not in _logged:
            _log_once(row.name, reason, refused=not ok)
        if ok:
            return row
    raise AssertionError("naive supports everything")


@contextmanager
def force_backend(name: str | None) -> Iterator[None]:
    """Makes every `attention` call inside the block use one backend.

    Args:
        name: a name out of `available()`; "auto" or None leaves the choice free, also against ``PARTSONG_ATTENTION``.

    Raises:
        ArgumentError: no backend has this name. An `attention` call the backend cannot compute raises
            UnsupportedError with the reason.
    """
    name = name or "auto"
    if name != "auto":
        _named(name)
    token = _FORCED.set(name)
    try:
        yield
    finally:
        _FORCED.reset(token)


def available() -> list[tuple[str, bool, str]]:
    """(name, usable on this machine, reason) of every backend, fastest first."""
    return [(row.name, *row.usable()) for row in BACKENDS.values()]


def _named(name: str) -> Backend:
    if name not in BACKENDS:
        raise ArgumentError(f"no attention backend is called {name!r}; choose auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]


def _log_once(name: str, reason: str, *, refused: bool = False) -> None:
    if (name, reason) not in _logged:
        _logged.add((name, reason))
        _LOG.debug("attention backend %s %s: %s", name, "not used" if refused else "used", reason)
