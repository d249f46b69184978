"""Runs the blocks of a denoiser or leaves them out, and remembers what they added."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from partsong.errors import UnsupportedError
from partsong.parallel.cuts.block_lists import Block, blocks_of
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, InputHook, OutputHook, signature_of
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.step_cache.forecasts import FORECASTS, Added, History
from partsong.parallel.strategy import Site

if TYPE_CHECKING:
    from partsong.parallel.step_cache.strategy import StepCache

__all__ = ["CachedBlocks"]

_Values = tuple[Any, ...]


@dataclass(slots=True)
class _Memory:
    """Remembers the last steps of one guidance branch.

    Attributes:
        first: what the first block added in the last full step.
        full: what each list of blocks added in the last full steps, by step; without the first block where that always
            runs.
        recent: the same for the last steps of any kind.
        skips: steps left out since the last full one.
        shapes: of the model's arguments; nothing that was kept fits others.
    """

    first: Tensor | None = None
    full: list[tuple[int, Added]] = field(default_factory=list)
    recent: list[tuple[int, Added]] = field(default_factory=list)
    skips: int = 0
    shapes: tuple[Any, ...] = ()


class CachedBlocks:
    """Runs or leaves out the blocks of one denoiser.

    Args:
        knobs: say when to leave blocks out.
        denoiser: the denoiser with these blocks.

    Attributes:
        computed: calls of this generation in which all blocks ran.
        skipped: calls in which blocks were left out.
        evaluations: blocks that ran in this generation.
    """

    def __init__(self, knobs: StepCache, denoiser: Site) -> None:
        self.knobs, self.denoiser, self.clock = knobs, denoiser, denoiser.clock
        self.blocks = blocks_of(denoiser.module, denoiser.adapter)
        self.forecast = FORECASTS[knobs.forecast]
        self.computed = self.skipped = self.evaluations = 0
        self._memories: defaultdict[int, _Memory] = defaultdict(_Memory)
        self._reached, self._skips = 0, False
        self._has_residuals = False
        self._start: _Values = ()
        self._leaving: _Values = ()
        self._sum: _Values = ()
        #: Of the call at work: what each list of blocks added so far, or what each is forecast to add.
        self._added: Added = []
        self._ahead: Added = []
        self.clock.on_begin(self.reset)

    def reset(self) -> None:
        """Forgets the last generation."""
        self._memories.clear()
        self.computed = self.skipped = self.evaluations = 0

    def attach(self, hooks: HookSet) -> None:
        """Puts the hooks on, before those that cut, which must be outside of them."""
        for number, block in enumerate(self.blocks):
            hooks.add(block.module, AroundHook(self._around(number, block), signature_of(block.module)), "cache")
        hooks.add(self.denoiser.module, InputHook(self._begin, signature_of(self.denoiser.module)), "cache-begin")
        hooks.add(self.denoiser.module, OutputHook(self._end), "cache-end")

    def _begin(self, named: dict[str, Any]) -> None:
        self._reached, self._skips = 0, False
        self._start = self._leaving = self._sum = ()
        self._added, self._ahead = [], []
        self._has_residuals = any(named.get(name) is not None for name in self.denoiser.adapter.residuals)
        shapes = tuple(value.shape for value in tree_leaves(named) if isinstance(value, Tensor))
        if self._memory.shapes != shapes:
            self._memories[self.clock.branch] = _Memory(shapes=shapes)
        if self.knobs.mask is not None:
            self._decide(self._may_skip and self.knobs.leaves_out(self.clock.step))

    def _end(self, output: Any) -> Any:
        if self._reached != len(self.blocks):
            raise UnsupportedError(
                f"StepCache on {self.denoiser.adapter.model}: {self._reached} of {len(self.blocks)} blocks were "
                "called; calls that leave blocks out (skip_layers) cannot be cached, leave StepCache out"
            )
        if not self._skips:
            self._keep(self._memory.full, self.forecast.num_full)
        self._keep(self._memory.recent, self.forecast.num_recent)
        self._start = self._leaving = ()
        return output

    def _keep(self, kept: list[tuple[int, Added]], num: int) -> None:
        kept.append((self.clock.step, self._added))
        del kept[: max(len(kept) - num, 0)]

    def predict(self, step: int) -> int:
        """Returns the bytes this rank sends in one call to decide whether blocks are left out."""
        is_last = self.knobs.keep_last and self.clock.num_steps == step + 1
        if self.knobs.mask is not None or step < self.knobs.warmup_steps or is_last:
            return 0
        return 16 * (self.denoiser.shared.size - 1)

    @property
    def _memory(self) -> _Memory:
        return self._memories[self.clock.branch]

    def _around(self, number: int, block: Block) -> Callable[..., Any]:
        is_first = number == 0 and self.knobs.mask is None  # it always runs

        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
            self._reached += 1
            entering = tuple(named[name] for name in block.names)
            if self._skips and not is_first:
                return _returned(self._forecast_after(entering) if block.is_last else entering)
            output = forward(**named)
            self.evaluations += 1
            leaving = output if isinstance(output, tuple) else (output,)
            if is_first:
                self._ask(leaving[block.picture] - entering[block.picture])
                if self._skips and block.is_last:
                    return _returned(self._forecast_after(leaving))
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
            self._added.append(self._sum)
            self._sum = ()

    def _close_run(self) -> None:
        if self._leaving:
            # A last block may return no text, since nothing reads it after that.
            pairs = zip(self._leaving, self._start, strict=True)
            added: _Values = tuple(None if after is None else after - before for after, before in pairs)
            self._sum = _sum(self._sum, added) if self._sum else added
        self._start = self._leaving = ()

    def _forecast_after(self, entering: _Values) -> _Values:
        """Returns what leaves the next list of blocks, by the forecast of this step."""
        ahead = self._ahead[len(self._added)]
        self._added.append(ahead)
        return _sum(entering, ahead)

    @property
    def _may_skip(self) -> bool:
        if self.denoiser.shared.dry or not self._memory.full:  # a dry run computes everything
            return False
        is_kept = self.knobs.keep_last and self.clock.is_last_step
        return self.clock.step >= self.knobs.warmup_steps and not is_kept

    def _ask(self, first: Tensor) -> None:
        """Asks the first block whether the others are left out, alike on all ranks that share the call."""
        memory = self._memory
        may_skip = self._may_skip and memory.skips < self.knobs.max_skips
        self._decide(may_skip and self._change(first, memory.first) < self.knobs.threshold)
        if not self._skips:
            memory.first = first

    def _decide(self, skips: bool) -> None:
        """Leaves the blocks of this call out, or runs them."""
        memory, self._skips = self._memory, skips
        if skips:
            memory.skips += 1
            self.skipped += 1
            # The levels of steps are settled when those have ended, so the steps are kept and not the levels.
            kinds = (memory.full, memory.recent)
            full, recent = ([(self.clock.level(step), added) for step, added in kept] for kept in kinds)
            self._ahead = self.forecast.run(History(full, recent), self.clock.level(self.clock.step))
        else:
            memory.skips = 0
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
