"""Predicts a generation under many mixes of strategies, several at the same time."""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from partsong.errors import PartsongError
from partsong.fork_server import has_gpu_files
from partsong.planner.estimate import Estimate, estimate
from partsong.planner.hardware import Machine
from partsong.planner.memory import RESERVED
from partsong.planner.steps import Tracer
from partsong.samplers.registry import OffloadWeights, Strategy

__all__ = ["estimates", "offloaded_estimates"]

_Mix = tuple[Strategy, ...]
#: Predicts a generation under a mix on a machine.
_Predict = Callable[[Tracer, _Mix, Machine, int], Estimate]
#: What a forked process finds in memory: a tracer holds functions, which cannot be sent to it.
_inherited: dict[str, tuple[Tracer, int, _Predict]] = {}
#: Parts of the weights in which the share that stays on a device is chosen.
_PARTS = 20


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
    serial = estimate(tracer, (), replace(machine, ranks=1, per_node=1, across=None), steps)
    return serial, _predicted(estimate, tracer, mixes, machine, steps, processes)


def offloaded_estimates(
    tracer: Tracer, rows: Iterable[Estimate], machine: Machine, steps: int, processes: int = 1
) -> list[tuple[_Mix, Estimate | str]]:
    """Predicts mixes that do not fit with the largest share of the blocks' weights on the device that does.

    Args:
        tracer: of the model and the size.
        rows: the mixes; those that `OffloadWeights` does not run beside are left out.
        machine: what the ranks run on.
        steps: of the generation.
        processes: as for `estimates`.
    """
    mixes = [
        row.strategies
        for row in rows
        if all(OffloadWeights().composes(strategy) for strategy in row.strategies if strategy.denoises)
    ]
    return _predicted(_offloaded, tracer, mixes, machine, steps, processes)


def _offloaded(tracer: Tracer, mix: _Mix, machine: Machine, steps: int) -> Estimate:
    inside = [strategy for strategy in mix if strategy.denoises]
    beside = [strategy for strategy in mix if not strategy.denoises]

    def predicted(share: float) -> Estimate:
        return estimate(tracer, (*inside, OffloadWeights(resident=share), *beside), machine, steps)

    best, share = predicted(0.0), 0.0
    away = [tracer.trace(each, machine.ranks, steps).weights for each in (inside, [*inside, OffloadWeights()])]
    moved = max(1, away[0] - away[1])
    # Memory grows with the share once the denoiser's steps are the peak, which they need not be at first.
    for _ in range(_PARTS):
        left = machine.device.memory * (1 - RESERVED) - best.memory
        more = min(1.0, math.floor((share + left / moved) * _PARTS) / _PARTS)
        if more <= share:
            break
        best, share = predicted(more), more
    return best


def _predicted(
    predict: _Predict, tracer: Tracer, mixes: Iterable[_Mix], machine: Machine, steps: int, processes: int
) -> list[tuple[_Mix, Estimate | str]]:
    """Returns each mix with its prediction, or with the reason for which it cannot run."""
    asked = [(mix, machine) for mix in mixes]
    attempts: Iterator[Estimate | PartsongError] = (_attempt(tracer, steps, predict, *each) for each in asked)
    if processes > 1 and asked and sys.platform == "linux" and not has_gpu_files():
        _inherited["here"] = tracer, steps, predict
        try:
            with multiprocessing.get_context("fork").Pool(max(1, min(processes, len(asked)))) as pool:
                attempts = iter(pool.map(_attempt_inherited, asked, chunksize=1))
        finally:
            _inherited.clear()
    answers: list[tuple[_Mix, Estimate | str]] = []
    for (mix, _), row in zip(asked, attempts, strict=True):
        answers.append((mix, str(row)) if isinstance(row, PartsongError) else (row.strategies, row))
    return answers


def _attempt(tracer: Tracer, steps: int, predict: _Predict, mix: _Mix, machine: Machine) -> Estimate | PartsongError:
    try:
        return predict(tracer, mix, machine, steps)
    except PartsongError as reason:
        return reason


def _attempt_inherited(asked: tuple[_Mix, Machine]) -> Estimate | PartsongError:
    return _attempt(*_inherited["here"], *asked)
