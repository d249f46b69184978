"""What `StepCache` keeps of a denoiser's blocks between steps, and the hooks that use it."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.cuts.block_lists import Block, blocks_of
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, InputHook, OutputHook
from partsong.parallel.ranks.collectives import agree

if TYPE_CHECKING:
    from partsong.parallel.plan.denoiser import Denoiser
    from partsong.parallel.step_cache import StepCache

__all__ = ["CachedBlocks"]

_STREAM = "hidden_states"
_Values = tuple[Any, ...]


@dataclass(slots=True)
class _Memory:
    """Of one guidance branch.

    Attributes:
        first: what the first block added when all blocks were last computed.
        added: for each list of blocks, what it added then, the first block's share left out.
        skips: steps in a row that were left out since.
    """

    first: Tensor | None = None
    added: list[_Values] = field(default_factory=list)
    skips: int = 0


class CachedBlocks:
    """The blocks of one denoiser.

    Args:
        knobs: when to leave blocks out.
        denoiser: whose blocks.

    Attributes:
        computed: calls of this generation in which all blocks ran.
        skipped: calls in which only the first did.
    """

    def __init__(self, knobs: StepCache, denoiser: Denoiser) -> None:
        self.knobs, self.denoiser, self.clock = knobs, denoiser, denoiser.plan.clock
        self.blocks = blocks_of(denoiser.module, denoiser.adapter)
        self.computed = self.skipped = 0
        self._memories: defaultdict[int, _Memory] = defaultdict(_Memory)
        self._reached, self._list, self._skips = 0, 0, False
        self._start: _Values = ()
        self.clock.on_begin(self.reset)

    def reset(self) -> None:
        """Forgets the last generation."""
        self._memories.clear()
        self.computed = self.skipped = 0

    def attach(self, hooks: HookSet) -> None:
        """Puts the hooks on; before those that cut, which must be outside of them."""
        for number, block in enumerate(self.blocks):
            hooks.add(block.module, AroundHook(self._around(number, block), _signature(block.module)), "cache")
        hooks.add(self.denoiser.module, InputHook(self._begin, _signature(self.denoiser.module)), "cache-begin")
        hooks.add(self.denoiser.module, OutputHook(self._end), "cache-end")

    def _begin(self, named: dict[str, Any]) -> None:
        self._reached = self._list = 0
        for name in self.denoiser.adapter.residuals:
            if named.get(name) is not None:
                raise UnsupportedError(
                    f"StepCache on {self.denoiser.adapter.model}: {name} was given, which is added between blocks; "
                    "leave StepCache out"
                )

    def _end(self, output: Any) -> Any:
        if self._reached != len(self.blocks):
            raise UnsupportedError(
                f"StepCache on {self.denoiser.adapter.model}: {self._reached} of {len(self.blocks)} blocks were "
                "called; calls that leave blocks out (skip_layers) cannot be cached, leave StepCache out"
            )
        return output

    def predict(self, step: int) -> int:
        """Bytes this rank sends in one call to decide; what is left out then, it does not send."""
        return 16 * (self.denoiser.shared.size - 1) if step >= self.knobs.warmup_steps else 0

    @property
    def _memory(self) -> _Memory:
        return self._memories[self.clock.branch]

    def _around(self, number: int, block: Block) -> Callable[..., Any]:
        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
            self._reached += 1
            entering = tuple(named[name] for name in block.names)
            if number > 0 and self._skips:
                leaving = self._added_again(entering) if block.is_last else entering
                return _returned(leaving)
            if number > 0 and self.blocks[number - 1].is_last:
                self._start = entering
            output = forward(**named)
            leaving = output if isinstance(output, tuple) else (output,)
            if number == 0:
                place = block.names.index(_STREAM)
                self._decide(leaving[place] - entering[place])
                self._start = leaving
                if self._skips and block.is_last:
                    leaving = self._added_again(leaving)
                    return _returned(leaving)
            if block.is_last and not self._skips:
                # A last block may return no text, which nobody reads any more.
                both = zip(leaving, self._start, strict=True)
                self._memory.added.append(tuple(None if a is None else a - b for a, b in both))
            return output

        return run

    def _added_again(self, entering: _Values) -> _Values:
        added, self._list = self._memory.added[self._list], self._list + 1
        return tuple(None if more is None else value + more for value, more in zip(entering, added, strict=True))

    def _decide(self, first: Tensor) -> None:
        """Whether the other blocks are left out; the same on all ranks that share the call."""
        memory = self._memory
        known = memory.first is not None and memory.first.shape == first.shape
        known = known and not first.is_meta  # a dry run computes everything
        may = known and self.clock.step >= self.knobs.warmup_steps and memory.skips < self.knobs.max_skips
        self._skips = may and self._change(first, memory.first) < self.knobs.threshold
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


def _returned(values: _Values) -> Any:
    """As a block returns them: one value alone, several as a tuple."""
    return values if len(values) > 1 else next(iter(values))


def _signature(module: Any) -> inspect.Signature:
    return inspect.signature(module.forward)
