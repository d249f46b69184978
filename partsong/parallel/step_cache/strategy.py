"""Leaves out the blocks of steps that differ little from earlier ones, and adds a forecast of what they would add."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from partsong.errors import ArgumentError, UnsupportedError
from partsong.knobs import Count, Digits, Number, check_fields
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.block_lists import chain_reason
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.step_cache.blocks import CachedBlocks
from partsong.parallel.step_cache.forecasts import ForecastName
from partsong.parallel.step_cache.measures import DecideName, MeasureName
from partsong.parallel.step_cache.tables import CacheCalibration
from partsong.parallel.strategy import Kind, Site, Strategy

__all__ = ["StepCache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCache(Strategy):
    """Leaves out the blocks of some steps, and adds a forecast of what they would add.

    A measure estimates how far off a forecast would be. Where the estimate is below `threshold`, blocks are left out.
    Each sample of a batch decides for itself, and so does each guidance branch. With a `mask` nothing is measured: it
    selects the steps that are left out.

    The forecast extends the last full steps over the scheduler's noise level: held, or on the polynomial through the
    last two or three. What the model adds between blocks, such as the residuals of a ControlNet, is always new. Ranks
    with parts of the same samples add up their sums first, so all decide alike, and as one rank would up to rounding.
    Approximate; with a threshold of 0 and no mask nothing is left out. It has no ranks of its own: combine it with the
    strategies that split.

    Use it when steps are many and the picture may differ a little, on any number of ranks.

    Args:
        threshold: estimated error below which blocks are left out.
        warmup_steps: first steps that are computed in full. The warm-up of a strategy that reads its last step's
            messages is computed in full too.
        max_skips: steps in a row that may be left out; a mask may leave out more.
        forecast: "hold" adds again what was added last, "linear" and "quadratic" continue the polynomial through the
            last two and three full steps, "half" goes half as far as "linear", "foca" takes the mean of two slopes.
        keep_last: whether the last step is always computed, where the number of steps is known.
        mask: a digit for each step after the warm-up, 1 to compute it and 0 to leave it out; it begins anew where it
            ends, so "01" leaves out every second step. None lets the measure decide.
        measure: "first_block" always computes the first block, and compares what it adds with what it added in the last
            full step. "input" adds up, since then, how far the modulated input of the first block has changed from step
            to step, each change turned into one of the output by a calibrated polynomial. "magnitude" adds up how far
            the size of what all blocks add has drifted, as calibrated. "spectral" adds up how far what is not noise
            in that input has changed, which needs no calibration but a scheduler that says how much noise there is.
            All three leave the first block out with the others.
        calibration: the model's numbers for "input" and "magnitude", or a file with them. None
            takes ``step_cache.json`` from the folder of the model.
        decide: "now" waits in each step for that step's measurement. "late" uses the previous step's measurement and
            counts its change twice, so that a step waits neither for the GPU's host nor for other ranks.

    Source: the first-block form of residual caches, ParaAttention's, and TeaCache's (arXiv 2411.19108); MagCache's
    ratios (arXiv 2506.09045); SeaCache's filter (arXiv 2602.18993); forecasts: TaylorSeer (arXiv 2503.06923), here with
    the interpolating polynomial over noise levels, and FoCa (arXiv 2508.16211); masks: cache-dit.
    """

    kind: ClassVar[Kind] = "approximate"

    threshold: Annotated[float, Number(0.0)] = 0.08
    warmup_steps: Count = 2
    max_skips: Count = 3
    forecast: ForecastName = "hold"
    keep_last: bool = True
    mask: Annotated[str, Digits("01")] | None = None
    measure: MeasureName = "first_block"
    calibration: CacheCalibration | Path | None = None
    decide: DecideName = "now"

    def validate(self) -> None:
        """Refuses knob values out of bounds.

        Raises:
            ArgumentError: names the knob, the value and the legal ones.
        """
        check_fields(self)
        if not isinstance(self.calibration, CacheCalibration | Path | str | None):
            raise ArgumentError(f"StepCache: calibration={self.calibration!r}; use a CacheCalibration or a path")

    def stale(self) -> str:
        """Says what is old, and when."""
        blocks = "all blocks but the first" if self.measure == "first_block" and self.mask is None else "all blocks"
        when = f"for which the mask {self.mask} has a 0"
        if self.mask is None:
            when = f"where the error is estimated below {self.threshold}, {self.max_skips} in a row"
        return (
            f"{blocks} in the steps after the first {self.warmup_steps} {when}, forecast ({self.forecast}); such a "
            "step sends less than is shown here"
        )

    def leaves_out(self, step: int) -> bool:
        """Says whether the mask leaves out a step after the warm-up."""
        return self.mask is not None and self.mask[(step - self.warmup_steps) % len(self.mask)] == "0"

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models whose blocks are not one chain."""
        reason = chain_reason(adapter)
        return None if reason is None else f"{reason}; leave it out"

    def attach(self, denoiser: Site, hooks: HookSet) -> CachedBlocks:
        """Puts on the hooks that compare and leave out, and returns what they share.

        Raises:
            UnsupportedError: the model's blocks are not one chain, or the measure is not for this model.
        """
        reason = self.refuses(denoiser.adapter)
        if reason is not None:
            raise UnsupportedError(f"StepCache on {denoiser.adapter.model}: {reason}")
        cached = CachedBlocks(self, denoiser)
        cached.attach(hooks)
        return cached
