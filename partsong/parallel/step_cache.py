"""Leaves out the blocks of a step where the first block shows that little has changed since the last full step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.knobs import Count, Number
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.block_lists import Block, blocks_of, chain_reason
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, InputHook, OutputHook, signature_of
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.strategy import Kind, Site, Strategy

__all__ = ["CachedBlocks", "StepCache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCache(Strategy):
    """Reuses what the blocks added in an earlier step, where the first block adds nearly the same again.

    The first block is always computed. What it adds is compared with what it added in the last full step. Where the sum
    of absolute differences, relative to the sum of absolute values, is below `threshold`, the other blocks are left out
    and what they added in that step is added again. What the model adds between blocks, such as the residuals of a
    ControlNet, is always new. Guidance branches decide for themselves. Ranks that share a call add their sums up first,
    so all decide alike, and as one rank would up to rounding. Approximate; with a threshold of 0 nothing is left out.
    It has no ranks of its own: combine it with the strategies that split.

    Args:
        threshold: relative change below which blocks are left out.
        warmup_steps: first steps that are computed in full.
        max_skips: steps in a row that may be left out.

    Source: the first-block form of residual caches, ParaAttention's and TeaCache's (arXiv 2411.19108).
    """

    kind: ClassVar[Kind] = "approximate"

    threshold: Annotated[float, Number(0.0)] = 0.08
    warmup_steps: Count = 2
    max_skips: Count = 3

    def stale(self) -> str:
        """Says what is old, and when."""
        return (
            f"all blocks but the first, where that one changed by less than {self.threshold} (after "
            f"{self.warmup_steps} steps, {self.max_skips} in a row); such a step sends less than is shown here"
        )

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


_Values = tuple[Any, ...]


@dataclass(slots=True)
class _Memory:
    """Remembers the last full step of one guidance branch.

    Attributes:
        first: what the first block added in it.
        added: what each list of blocks added in it, without the first block.
        skips: steps left out since.
    """

    first: Tensor | None = None
    added: list[_Values] = field(default_factory=list)
    skips: int = 0


class CachedBlocks:
    """Runs or leaves out the blocks of one denoiser.

    Args:
        knobs: say when to leave blocks out.
        denoiser: the denoiser with these blocks.

    Attributes:
        computed: calls of this generation in which all blocks ran.
        skipped: calls in which only the first did.
    """

    def __init__(self, knobs: StepCache, denoiser: Site) -> None:
        self.knobs, self.denoiser, self.clock = knobs, denoiser, denoiser.clock
        self.blocks = blocks_of(denoiser.module, denoiser.adapter)
        self.computed = self.skipped = 0
        self._memories: defaultdict[int, _Memory] = defaultdict(_Memory)
        self._reached, self._list, self._skips = 0, 0, False
        self._has_residuals = False
        self._start: _Values = ()
        self._leaving: _Values = ()
        self._added: _Values = ()
        self.clock.on_begin(self.reset)

    def reset(self) -> None:
        """Forgets the last generation."""
        self._memories.clear()
        self.computed = self.skipped = 0

    def attach(self, hooks: HookSet) -> None:
        """Puts the hooks on, before those that cut, which must be outside of them."""
        for number, block in enumerate(self.blocks):
            hooks.add(block.module, AroundHook(self._around(number, block), signature_of(block.module)), "cache")
        hooks.add(self.denoiser.module, InputHook(self._begin, signature_of(self.denoiser.module)), "cache-begin")
        hooks.add(self.denoiser.module, OutputHook(self._end), "cache-end")

    def _begin(self, named: dict[str, Any]) -> None:
        self._reached = self._list = 0
        self._start = self._leaving = self._added = ()
        self._has_residuals = any(named.get(name) is not None for name in self.denoiser.adapter.residuals)

    def _end(self, output: Any) -> Any:
        if self._reached != len(self.blocks):
            raise UnsupportedError(
                f"StepCache on {self.denoiser.adapter.model}: {self._reached} of {len(self.blocks)} blocks were "
                "called; calls that leave blocks out (skip_layers) cannot be cached, leave StepCache out"
            )
        self._start = self._leaving = ()
        return output

    def predict(self, step: int) -> int:
        """Returns the bytes this rank sends in one call to decide whether blocks are left out."""
        return 16 * (self.denoiser.shared.size - 1) if step >= self.knobs.warmup_steps else 0

    @property
    def _memory(self) -> _Memory:
        return self._memories[self.clock.branch]

    def _around(self, number: int, block: Block) -> Callable[..., Any]:
        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
            self._reached += 1
            entering = tuple(named[name] for name in block.names)
            if number > 0 and self._skips:
                return _returned(self._added_again(entering) if block.is_last else entering)
            output = forward(**named)
            leaving = output if isinstance(output, tuple) else (output,)
            if number == 0:
                self._decide(leaving[block.picture] - entering[block.picture])
                if self._skips and block.is_last:
                    return _returned(self._added_again(leaving))
                entering = leaving  # what the first block adds is never left out
            if not self._skips:
                self._note(entering, leaving, block.is_last)
            return output

        return run

    def _note(self, entering: _Values, leaving: _Values, is_last: bool) -> None:
        """Adds up what the blocks of a list add, without what the model adds between two of them."""
        if len(entering) != len(self._leaving) or any(a is not b for a, b in zip(entering, self._leaving, strict=True)):
            self._close_run()
            self._start = entering
        self._leaving = leaving
        # Residuals may be added in place, where the next block gets the tensor that this one returned.
        if is_last or self._has_residuals:
            self._close_run()
        if is_last:
            self._memory.added.append(self._added)
            self._added = ()

    def _close_run(self) -> None:
        if self._leaving:
            # A last block may return no text, since nothing reads it after that.
            pairs = zip(self._leaving, self._start, strict=True)
            added: _Values = tuple(None if after is None else after - before for after, before in pairs)
            self._added = _sum(self._added, added) if self._added else added
        self._start = self._leaving = ()

    def _added_again(self, entering: _Values) -> _Values:
        added, self._list = self._memory.added[self._list], self._list + 1
        return _sum(entering, added)

    def _decide(self, first: Tensor) -> None:
        """Decides whether the other blocks are left out, alike on all ranks that share the call."""
        memory = self._memory
        before = None if first.is_meta else memory.first  # a dry run computes everything
        may_skip = self.clock.step >= self.knobs.warmup_steps and memory.skips < self.knobs.max_skips
        is_comparable = before is not None and before.shape == first.shape
        self._skips = may_skip and is_comparable and self._change(first, before) < self.knobs.threshold
        if self._skips:
            memory.skips += 1
            self.skipped += 1
        else:
            memory.first, memory.added, memory.skips = first, [], 0
            self.computed += 1

    def _change(self, first: Tensor, before: Tensor | None) -> float:
        assert before is not None
        change = (first - before).abs().sum(dtype=torch.float64).item()
        size = before.abs().sum(dtype=torch.float64).item()
        rows = agree(self.denoiser.shared, [change, size], name="whether to leave blocks out")
        change, size = (sum(row[i] for row in rows) for i in range(2))
        return change / size if size else float(change > 0)


def _sum(values: _Values, more: _Values) -> _Values:
    return tuple(None if b is None else a + b for a, b in zip(values, more, strict=True))


def _returned(values: _Values) -> Any:
    """Returns values as a block does: one value alone, several as a tuple."""
    return values if len(values) > 1 else next(iter(values))
