"""Predicts a generation under many mixes of strategies, several at the same time."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from partsong.errors import PartsongError
from partsong.fork_server import has_gpu_files
from partsong.planner.estimate import Estimate, estimate
from partsong.planner.hardware import Machine
from partsong.planner.steps import Tracer
from partsong.samplers.registry import Strategy

__all__ = ["estimates"]

_Mix = tuple[Strategy, ...]
#: What a forked process finds in memory: a tracer holds functions, which cannot be sent to it.
_inherited: dict[str, tuple[Tracer, int]] = {}


def estimates(
    tracer: Tracer, mixes: Iterable[_Mix], machine: Machine, steps: int, processes: int = 1
) -> tuple[Estimate, list[tuple[_Mix, Estimate | str]]]:
    """Predicts a generation on one device, and under each mix.

    Args:
        tracer: of the model and the size.
        mixes: of strategies.
        machine: what the ranks run on.
        steps: of the generation.
        processes: how many predict at the same time. More than one only in a program that has no other threads: the
            others are forked from it. One is used where forks are unsafe: not on Linux, or where there is a GPU.

    Returns:
        The prediction of one device, and each mix with its own, or with the reason for which it cannot run.

    Raises:
        PartsongError: the model cannot be traced.
    """
    alone = replace(machine, ranks=1, per_node=1, across=None)
    asked = [((), alone), *((mix, machine) for mix in mixes)]
    attempts: Iterator[Estimate | PartsongError] = (_attempt(tracer, mix, on, steps) for mix, on in asked)
    serial = next(attempts)
    if isinstance(serial, PartsongError):
        raise serial
    if processes > 1 and sys.platform == "linux" and not has_gpu_files():
        _inherited["here"] = tracer, steps
        try:
            with multiprocessing.get_context("fork").Pool(max(1, min(processes, len(asked)))) as pool:
                attempts = iter(pool.map(_attempt_inherited, asked[1:], chunksize=1))
        finally:
            _inherited.clear()
    return serial, [
        (mix, str(row) if isinstance(row, PartsongError) else row)
        for (mix, _), row in zip(asked[1:], attempts, strict=True)
    ]


def _attempt(tracer: Tracer, mix: _Mix, machine: Machine, steps: int) -> Estimate | PartsongError:
    try:
        return estimate(tracer, mix, machine, steps)
    except PartsongError as reason:
        return reason


def _attempt_inherited(asked: tuple[_Mix, Machine]) -> Estimate | PartsongError:
    tracer, steps = _inherited["here"]
    return _attempt(tracer, *asked, steps)
