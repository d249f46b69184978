"""Decides which kernel computes an attention call.

A backend is a row: a name, `supports(call) -> (ok, reason)` and a function. Rows are tried in order for the device of
q, and the specification (`naive`) takes what is left. Native rows read segments, mask kinds and `init` themselves; the
others get the call in its plain form. To see why a call did not get a faster kernel, switch logging of
``partsong.kernels`` to DEBUG: every choice and every refusal is logged once.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.backends import (
    chosen_blocks,
    cpu_flash,
    cuda,
    flash3,
    flex,
    gluon_attention,
    naive,
    triton_attention,
    xformers,
)
from partsong.kernels.call import Call
from partsong.kernels.masks import ChosenBlocks
from partsong.kernels.merge import merge_checked
from partsong.kernels.tuned import tuned

__all__ = ["BACKENDS", "Backend", "available", "choose", "compute", "force_backend"]

_LOG = logging.getLogger("partsong.kernels")

#: Environment variable that forces a backend by name, as `force_backend` does; "auto" or empty leaves the choice free.
ENV = "PARTSONG_ATTENTION"


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """Describes one attention kernel.

    Attributes:
        name: what users force it by.
        usable: () -> (ok, reason): whether it can run on this machine at all.
        supports: (call) -> (ok, reason) for a call that is checked and not empty.
        run: (call) -> (out, lse), keeping the contract of `partsong.kernels.attention`.
        native: whether it takes any `Call`; else it gets plain ones: one tensor of keys, an additive bias, at most the
            square causal mask, no `init`.
    """

    name: str
    usable: Callable[[], tuple[bool, str]]
    supports: Callable[[Call], tuple[bool, str]]
    run: Callable[[Call], tuple[Tensor, Tensor]]
    native: bool = False


def _row(name: str, kernel: Any, native: bool = False) -> Backend:
    """Makes a row of a module, or another object, that has the three functions."""
    return Backend(name=name, usable=kernel.usable, supports=kernel.supports, run=kernel.run, native=native)


_NAIVE, _CPU_FLASH = _row("naive", naive), _row("cpu_flash", cpu_flash)
_BLOCKS = _row("blocks", chosen_blocks, native=True)
_CUDA = (
    _row("cudnn", cuda.CUDNN),
    _row("flash", cuda.FLASH),
    _row("efficient", cuda.EFFICIENT),
    _row("triton", triton_attention, native=True),
)
_HOPPER = (_row("flash3", flash3), _row("gluon", gluon_attention))

#: Every backend, fastest first as a rule; a GPU's own order per class of shapes is in `tuned`.
BACKENDS: dict[str, Backend] = {
    row.name: row
    for row in (
        _BLOCKS,
        *_HOPPER,
        *_CUDA,
        _row("xformers", xformers),
        _CPU_FLASH,
        _row("flex", flex, native=True),
        _NAIVE,
    )
}

#: ROCm calls its devices "cuda". It has no cuDNN, and our Triton kernel, which nobody has measured there, goes by name.
_ROCM = (_row("flash", cuda.FLASH), _row("efficient", cuda.EFFICIENT))
_BY_DEVICE: dict[str, tuple[Backend, ...]] = {
    "cpu": (_CPU_FLASH, _NAIVE),
    "cuda": (*_CUDA, _NAIVE),
    "rocm": (*_ROCM, _NAIVE),
}
_FORCED: ContextVar[str | None] = ContextVar("partsong_attention", default=None)
_logged: set[tuple[str, str]] = set()
#: Kinds of calls whose tiles a backend could not start on this GPU -> what it said.
_too_large: dict[tuple[Any, ...], str] = {}
#: Rows chosen before for calls of this kind, so that choosing again costs the host next to nothing.
_chosen: dict[tuple[Any, ...], Backend] = {}


def compute(call: Call) -> tuple[Tensor, Tensor]:
    """Runs a checked call that is not empty on the first backend that can do it.

    Raises:
        ArgumentError: the environment variable names no backend.
        UnsupportedError: the forced backend cannot compute it.
    """
    while (choice := choose(call)) is not None:
        row, form = choice
        try:
            result = row.run(form)
        except Exception as error:
            # Triton's error, which cannot be imported where it is not installed: a tile does not fit this GPU.
            if type(error).__name__ != "OutOfResources":
                raise
            _too_large[_size_of(row, form)] = f"its tiles do not fit this GPU: {error}"
            _chosen.clear()
            continue
        return result if row.native or call.init is None else merge_checked([call.init, result])
    return _compute_by_segment(call)


def choose(call: Call) -> tuple[Backend, Call] | None:
    """Finds the backend for a call and the form it takes; None where segments must be computed separately."""
    kind = _kind_of(call)
    if kind in _chosen:
        row = _chosen[kind]
        return row, call if row.native else call.plain()
    choice = _choose(call)
    if kind is not None and choice is not None:
        _chosen[kind] = choice[0]
    return choice


def _kind_of(call: Call) -> tuple[Any, ...] | None:
    """Returns all that decides on the backend of a call without a mask, bias or second segment; None for others."""
    first, *others = call.segments
    if call.mask is not None or call.bias is not None or others or first.bias:
        return None
    q = call.q
    forced = _FORCED.get() or _from_environment()
    cudnn = torch.backends.cudnn.enabled
    return q.shape, first.k.shape, q.dtype, q.device, call.needs_gradient, forced, cudnn


def _choose(call: Call) -> tuple[Backend, Call] | None:
    rows, forced = _candidates(call)
    in_parts = len(call.segments) > 1 and call.q.is_cuda
    plain = None
    for row in rows:
        if in_parts and not row.native:
            continue
        form = call if row.native else (plain := plain or call.plain())
        reason = _too_large.get(_size_of(row, form)) if _too_large else None
        ok, reason = (False, reason) if reason else row.supports(form)
        if (row.name, reason) not in _logged:
            _logged.add((row.name, reason))
            _LOG.debug("attention backend %s %s: %s", row.name, "used" if ok else "not used", reason)
        if ok:
            return row, form
        if forced:
            raise UnsupportedError(f"attention backend {row.name!r} was asked for but cannot do this: {reason}")
    return None


def _size_of(row: Backend, call: Call) -> tuple[Any, ...]:
    """Returns what decides how much memory a tile takes."""
    return row.name, call.q.dtype, call.q.shape[3], call.bias is not None, type(call.mask).__name__


def _compute_by_segment(call: Call) -> tuple[Tensor, Tensor]:
    """Computes segments separately, adds their bias to their log-sum-exp, and merges them.

    The fused CUDA operators take a bias only in q's dtype, where bfloat16 would round ln r; this way it stays float32,
    and keys and values are read where they lie.
    """
    parts = [] if call.init is None else [call.init]
    for segment, part in zip(call.segments, call.by_segment(), strict=True):
        out, lse = compute(part)
        parts.append((out, lse + segment.bias))
    return merge_checked(parts)


@functools.cache
def _from_environment() -> str | None:
    """Reads the environment once: the next attention would otherwise wait for it, too."""
    return os.environ.get(ENV)


def _candidates(call: Call) -> tuple[tuple[Backend, ...], bool]:
    """Lists the rows to try, in order, and says whether one was requested by name."""
    forced = _FORCED.get() or _from_environment()
    if forced and forced != "auto":
        return (_find_backend(forced),), True
    kind = call.q.device.type
    rows = _BY_DEVICE.get("rocm" if kind == "cuda" and torch.version.hip is not None else kind, (_NAIVE,))
    order = tuned("backends", call)
    if order:
        first = [BACKENDS[name] for name in order if name in BACKENDS]
        rows = (*first, *(row for row in rows if row not in first))
    return ((_BLOCKS, *rows) if isinstance(call.mask, ChosenBlocks) else rows), False


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
        _find_backend(name)
    token = _FORCED.set(name)
    try:
        yield
    finally:
        _FORCED.reset(token)


def available() -> list[tuple[str, bool, str]]:
    """Lists (name, usable on this machine, reason) for every backend, fastest first."""
    return [(row.name, *row.usable()) for row in BACKENDS.values()]


def _find_backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise ArgumentError(f"no attention backend is called {name!r}; choose auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]
