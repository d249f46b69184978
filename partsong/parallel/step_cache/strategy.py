"""Leaves out the blocks of steps that differ little from earlier ones, and adds a forecast of what they would add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from partsong.errors import UnsupportedError
from partsong.knobs import Count, Digits, Number
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.block_lists import chain_reason
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.step_cache.blocks import CachedBlocks
from partsong.parallel.step_cache.forecasts import ForecastName
from partsong.parallel.strategy import Kind, Site, Strategy

__all__ = ["StepCache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCache(Strategy):
    """Leaves out the blocks of some steps, and adds what they are forecast to add.

    The first block is always computed. What it adds is compared with what it added in the last full step. Where the sum
    of absolute differences, relative to the sum of absolute values, is below `threshold`, the other blocks are left
    out. With a `mask` nothing is compared: it says which steps are left out, the first block with the others.

    What the blocks would have added is forecast from the last full steps over the scheduler's noise level: held, or on
    the polynomial through the last two or three. What the model adds between blocks, such as the residuals of a
    ControlNet, is always new. Guidance branches decide for themselves. Ranks that share a call add their sums up first,
    so all decide alike, and as one rank would up to rounding. Approximate; with a threshold of 0 and no mask nothing is
    left out. It has no ranks of its own: combine it with the strategies that split.

    Args:
        threshold: relative change below which blocks are left out.
        warmup_steps: first steps that are computed in full.
        max_skips: steps in a row that may be left out; a mask may leave out more.
        forecast: "hold" adds again what was added last, "linear" and "quadratic" continue the polynomial through the
            last two and three full steps, "foca" takes the mean of two slopes.
        keep_last: whether the last step is always computed, where the number of steps is known.
        mask: a digit for each step after the warm-up, 1 to compute it and 0 to leave it out; it begins anew where it
            ends, so "01" leaves out every second step. None lets the first block decide.

    Source: the first-block form of residual caches, ParaAttention's and TeaCache's (arXiv 2411.19108); forecasts:
    TaylorSeer (arXiv 2503.06923), here with the interpolating polynomial over noise levels, and FoCa (arXiv
    2508.16211); masks: cache-dit.
    """

    kind: ClassVar[Kind] = "approximate"

    threshold: Annotated[float, Number(0.0)] = 0.08
    warmup_steps: Count = 2
    max_skips: Count = 3
    forecast: ForecastName = "hold"
    keep_last: bool = True
    mask: Annotated[str, Digits("01")] | None = None

    def stale(self) -> str:
        """Says what is old, and when."""
        if self.mask is not None:
            return (
                f"all blocks in the steps after the first {self.warmup_steps} for which the mask {self.mask} has a 0, "
                f"forecast ({self.forecast}); such a step sends less than is shown here"
            )
        return (
            f"all blocks but the first, where that one changed by less than {self.threshold} (after "
            f"{self.warmup_steps} steps, {self.max_skips} in a row), forecast ({self.forecast}); such a step sends "
            "less than is shown here"
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
            UnsupportedError: the model's blocks are not one chain, or another strategy needs every step.
        """
        reason = self.refuses(denoiser.adapter)
        if reason is not None:
            raise UnsupportedError(f"StepCache on {denoiser.adapter.model}: {reason}")
        for other in denoiser.strategies:
            if other.reads_last_step:
                raise UnsupportedError(
                    f"{type(other).__name__} reads in every step what the step before sent, which StepCache may leave "
                    "out; use one of them, or Ulysses with StepCache"
                )
        cached = CachedBlocks(self, denoiser)
        cached.attach(hooks)
        return cached
