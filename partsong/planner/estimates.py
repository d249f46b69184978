"""Predicts a generation under many mixes of strategies, several at the same time."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable, Iterator

from partsong.errors import PartsongError
from partsong.fork_server import has_gpu_files
from partsong.planner.denoising import Tracer
from partsong.planner.estimate import Estimate, estimate
from partsong.planner.hardware import Machine
from partsong.samplers.registry import Strategy

__all__ = ["estimates"]

_Mix = tuple[Strategy, ...]
#: What a forked process finds in memory: a tracer holds functions, which cannot be sent to it.
_inherited: dict[str, tuple[Tracer, Machine, int]] = {}


def estimates(
    tracer: Tracer, mixes: Iterable[_Mix], machine: Machine, steps: int, processes: int = 1
) -> Iterator[tuple[_Mix, Estimate | str]]:
    """Yields each mix with its prediction, or with the reason for which it cannot run.

    Args:
        tracer: of the model and the size.
        mixes: of strategies.
        machine: what the ranks run on.
        steps: of the generation.
        processes: how many predict at the same time. More than one only in a program that has no other threads: the
            others are forked from it. One is used where forks are unsafe: not on Linux, or where there is a GPU.
    """
    if processes == 1 or sys.platform != "linux" or has_gpu_files():
        yield from ((mix, _attempt(mix, tracer, machine, steps)) for mix in mixes)
        return
    asked = list(mixes)
    _inherited["here"] = tracer, machine, steps
    try:
        with multiprocessing.get_context("fork").Pool(max(1, min(processes, len(asked)))) as pool:
            yield from zip(asked, pool.imap(_attempt_inherited, asked), strict=True)
    finally:
        _inherited.clear()


def _attempt(mix: _Mix, tracer: Tracer, machine: Machine, steps: int) -> Estimate | str:
    try:
        return estimate(tracer, mix, machine, steps)
    except PartsongError as reason:
        return str(reason)


def _attempt_inherited(mix: _Mix) -> Estimate | str:
    return _attempt(mix, *_inherited["here"])
