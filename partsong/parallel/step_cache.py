"""Leaves out the blocks of a step whose first block says that little has changed since the last computed step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.cached_blocks import CachedBlocks
from partsong.parallel.cuts.block_lists import chain_reason
from partsong.parallel.strategy import Kind, Strategy

if TYPE_CHECKING:
    from partsong.parallel.hooks.model_hooks import HookSet
    from partsong.parallel.plan.denoiser import Denoiser

__all__ = ["StepCache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCache(Strategy):
    """Reuses what the blocks added in an earlier step, where the first block adds nearly the same again.

    The first block is always computed. Its contribution (what leaves it less what entered it) is compared with the one
    of the last step that was computed in full: where the sum of absolute differences, relative to the sum of absolute
    values, is below `threshold`, the other blocks are left out and their contribution of that step is added again.
    Guidance branches decide for themselves. Ranks that share a call add their sums up first, so they all decide alike,
    and as one rank alone would up to rounding. Approximate; with a threshold of 0 nothing is left out. Uses no ranks
    of its own: compose it with the strategies that split, or use it on one device.

    Args:
        threshold: relative change below which blocks are left out, at least 0.
        warmup_steps: first steps that are computed in full, at least 1.
        max_skips: steps in a row that may be left out.

    Source: the first-block form of residual caches, ParaAttention's and TeaCache's (arXiv 2411.19108).

    Example:
        >>> StepCache(threshold=0.05).kind
        'approximate'
    """

    kind: ClassVar[Kind] = "approximate"

    threshold: float = 0.08
    warmup_steps: int = 2
    max_skips: int = 3

    def validate(self) -> None:
        """Refuses negative thresholds and counts below one."""
        super(StepCache, self).validate()
        threshold = self.threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold < float("inf"):
            raise ArgumentError(f"StepCache: threshold={threshold!r}; use a number of at least 0, such as 0.08")
        for name, value in (("warmup_steps", self.warmup_steps), ("max_skips", self.max_skips)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"StepCache: {name}={value!r}; use 1 or more")

    def stale(self) -> str:
        """What is old, and when."""
        return (
            f"all blocks but the first, where that one changed by less than {self.threshold} (after "
            f"{self.warmup_steps} steps, {self.max_skips} in a row); such a step sends less than is told here"
        )

    def refuses(self, adapter: Adapter) -> str | None:
        """Models whose blocks are not one chain."""
        reason = chain_reason(adapter)
        return None if reason is None else f"{reason}; leave it out"

    def attach(self, denoiser: Denoiser, hooks: HookSet) -> CachedBlocks:
        """Puts the hooks on that compare and leave out, and returns what they share.

        Raises:
            UnsupportedError: the model's blocks are not one chain, or another strategy counts on every step.
        """
        reason = self.refuses(denoiser.adapter)
        if reason is not None:
            raise UnsupportedError(f"StepCache on {denoiser.adapter.model}: {reason}")
        others = (s for s in denoiser.plan.strategies if s is not self)
        for other in others:
            if other.reads_last_step:
                raise UnsupportedError(
                    f"{type(other).__name__} reads in every step what the step before sent, which StepCache may leave "
                    "out; use one of them, or Ulysses with StepCache"
                )
        cached = CachedBlocks(self, denoiser)
        cached.attach(hooks)
        return cached
