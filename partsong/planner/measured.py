"""Holds how far approximate strategies drift, as measured on the zoo."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partsong.parallel.step_cache.strategy import StepCache
from partsong.parallel.strategy import Strategy
from partsong.samplers.registry import (
    DisplacedPatch,
    DraftedSteps,
    LaggedLayers,
    PartialPatch,
    PatchPipeline,
    TimeParallel,
)

__all__ = ["FEWEST_STEPS", "drift_of"]


@dataclass(frozen=True, slots=True)
class _Likeness:
    """Describes a measurement: PSNR in dB of the median picture of `shapes` against its serial twin."""

    decibels: float
    file: str


_MIXES = "benchmarks/results/planner/2026-11-25-mixes.md"
_LAGGED = "benchmarks/results/drift/2026-11-24-lagged-layers.md"
_LIKENESS: dict[type[Strategy], _Likeness] = {
    DisplacedPatch: _Likeness(40.6, _MIXES),
    PartialPatch: _Likeness(39.1, _MIXES),
    PatchPipeline: _Likeness(41.7, _MIXES),
    TimeParallel: _Likeness(40.7, _MIXES),
    StepCache: _Likeness(45.0, "benchmarks/results/steps/2026-11-24-step-cache.md"),
}
#: By steps of a round, and by runs of blocks; larger numbers drift more than the last entry.
_DRAFTED = {2: _Likeness(43.6, "benchmarks/results/steps/2026-11-24-time-parallel.md"), 4: _Likeness(23.3, _MIXES)}
_LAGGING = {2: _Likeness(45.0, _LAGGED), 3: _Likeness(31.7, _LAGGED)}

#: Steps below which nothing was measured: neighbouring steps differ more, the fewer there are.
FEWEST_STEPS = 14


def drift_of(strategies: Sequence[Strategy], ranks: int) -> tuple[float, str | None]:
    """Returns how far pictures drift from their serial twins, and the file that says so.

    Args:
        strategies: the mix.
        ranks: how many there are in all.

    Returns:
        The root mean square of the difference of pixels in [0, 1], and None for exact strategies. That of the zoo's
        `shapes` at 28 steps, which stands for models of which nothing was measured; errors of several strategies add
        up. Infinite where more ranks take part than were measured.
    """
    known = [likeness for strategy in strategies if (likeness := _likeness(strategy, ranks)) is not None]
    if not known:
        return 0.0, None
    return sum(10 ** (-each.decibels / 20) for each in known), known[0].file


def _likeness(strategy: Strategy, ranks: int) -> _Likeness | None:
    if isinstance(strategy, DraftedSteps):
        return _at_most(_DRAFTED, strategy.depth)
    if isinstance(strategy, LaggedLayers):
        return _at_most(_LAGGING, strategy.components or strategy.degree or ranks)
    return _LIKENESS.get(type(strategy))


def _at_most(known: Mapping[int, _Likeness], number: int) -> _Likeness:
    nearest = min((each for each in known if each >= number), default=None)
    return _Likeness(-math.inf, next(iter(known.values())).file) if nearest is None else known[nearest]
