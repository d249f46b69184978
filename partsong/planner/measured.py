"""Holds what approximate strategies cost in likeness, and how many rounds loops take, as measured on the zoo."""

from __future__ import annotations

from collections.abc import Sequence
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

__all__ = ["drift_of", "rounds_of", "skipped_share"]


@dataclass(frozen=True, slots=True)
class _Likeness:
    """Describes a measurement: PSNR in dB of the median picture of `shapes` against its serial twin."""

    decibels: float
    file: str


_MIXES = "benchmarks/2026-11-25-mixes.md"
_LIKENESS: dict[type[Strategy], _Likeness] = {
    DisplacedPatch: _Likeness(40.6, _MIXES),
    PartialPatch: _Likeness(39.1, _MIXES),
    PatchPipeline: _Likeness(41.7, _MIXES),
    LaggedLayers: _Likeness(45.0, "benchmarks/2026-11-24-lagged-layers.md"),
    TimeParallel: _Likeness(40.7, _MIXES),
    DraftedSteps: _Likeness(43.6, "benchmarks/2026-11-24-time-parallel.md"),
    StepCache: _Likeness(45.0, "benchmarks/2026-11-24-step-cache.md"),
}

#: Rounds of 28 steps that `shapes` took by the points of a window, at the default tolerance.
_ROUNDS = {1: 28, 2: 15, 3: 13, 4: 13}
#: Share of the steps whose blocks `StepCache` left out at its default threshold.
_SKIPPED = 0.23


def drift_of(strategies: Sequence[Strategy]) -> tuple[float, str | None]:
    """Returns how far pictures stray from their serial twins, and the file that says so.

    Returns:
        The root mean square of the difference of pixels in [0, 1], and None for exact strategies. That of the zoo's
        `shapes`, which stands for models of which nothing was measured; errors of several strategies add up.
    """
    known = [_LIKENESS[type(strategy)] for strategy in strategies if type(strategy) in _LIKENESS]
    if not known:
        return 0.0, None
    return sum(10 ** (-each.decibels / 20) for each in known), known[0].file


def rounds_of(strategy: TimeParallel | DraftedSteps, steps: int) -> int:
    """Returns how many rounds a loop over windows of points takes."""
    if isinstance(strategy, DraftedSteps) and strategy.check is None:
        drafted = max(0, steps - strategy.warmup_steps)
        return steps - drafted + -(-drafted // strategy.depth)
    window = strategy.depth if isinstance(strategy, DraftedSteps) else strategy.window
    return -(-steps * _ROUNDS.get(window, 13) // 28)


def skipped_share() -> float:
    """Returns the share of steps whose blocks a cache leaves out at its default threshold."""
    return _SKIPPED
