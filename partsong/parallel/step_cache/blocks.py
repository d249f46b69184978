"""Runs the blocks of a denoiser or leaves them out, sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from partsong.errors import UnsupportedError
from partsong.parallel.cuts.block_lists import Block, blocks_of
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, InputHook, OutputHook, signature_of
from partsong.parallel.step_cache.additions import Additions, added_to, as_returned
from partsong.parallel.step_cache.history import Added, Forecaster, chosen
from partsong.parallel.step_cache.knobs import CacheKnobs
from partsong.parallel.step_cache.measuring import Measure, Measuring
from partsong.parallel.strategy import Site

__all__ = ["CachedBlocks", "Decision"]


class _SeenEnough(Exception):  # noqa: N818 - it is no error
    """Ends the call of the first block when its modulated input has shown that its blocks are left out."""


@dataclass(slots=True)
class _Memory:
    """Remembers the last steps of one guidance branch.

    Attributes:
        shapes: those of the model's arguments; what was kept fits no others.
        forecaster: knows what lists of blocks added.
        measure: estimates how far off a forecast would be; None where a mask decides.
        skips: for each sample that decides for itself, the steps skipped since its last full one.
    """

    shapes: tuple[Any, ...]
    forecaster: Forecaster
    measure: Measure | None
    skips: list[int]


@dataclass(frozen=True, slots=True)
class Decision:
    """Records the decision on one call.

    Attributes:
        step: number of the step.
        branch: number of the guidance branch.
        left_out: for each sample, whether its blocks were left out.
        errors: what the measure estimated, for each sample that decided for itself; empty where nothing was measured.
    """

    step: int
    branch: int
    left_out: tuple[bool, ...]
    errors: tuple[float, ...] = ()


@dataclass(slots=True)
class _Pass:
    """Holds the state of one run of the model.

    Attributes:
        additions: adds up what its blocks add.
        rows: the samples it is for; None is all of them.
        leaves_out: whether blocks are left out; None while undecided.
        ahead: what the lists of blocks are forecast to add.
        reached: blocks that were called so far.
        first: output of the first block, where the measure needed it to run.
    """

    additions: Additions
    rows: list[int] | None = None
    leaves_out: bool | None = None
    ahead: Added = field(default_factory=list)
    reached: int = 0
    first: tuple[Any, ...] = ()


class CachedBlocks:
    """Runs or leaves out the blocks of one denoiser.

    Args:
        knobs: say when to leave blocks out.
        denoiser: the denoiser with these blocks.

    Attributes:
        computed: how often in this generation a sample's blocks all ran.
        skipped: how often they were left out.
        evaluations: blocks that ran for a sample in this generation.
        decisions: those on each call of this generation.
    """

    skips_blocks = True

    def __init__(self, knobs: CacheKnobs, denoiser: Site) -> None:
        self.knobs, self.denoiser, self.clock = knobs, denoiser, denoiser.clock
        self.blocks = blocks_of(denoiser.module, denoiser.adapter)
        self.measuring = Measuring(knobs, denoiser)
        others = [other for other in denoiser.strategies if other.reads_last_step]
        #: Such a strategy reads what it sent in its warm-up, so nothing is left out there.
        self.warmup_steps = max([knobs.warmup_steps, *(other.warmup_steps for other in others)])
        self.computed = self.skipped = self.evaluations = 0
        self.decisions: list[Decision] = []
        self._memories: dict[int, _Memory] = {}
        self._named: Mapping[str, Any] = {}
        self._pass = _Pass(Additions(False))
        self._postponed: list[int] = []
        self._shape: Any = None
        self._on_computed: list[Callable[[Added], None]] = []
        self.clock.on_begin(self.reset)
        self.clock.on_end(self.forget)

    def reset(self) -> None:
        """Forgets the last generation."""
        self.forget()
        self.decisions.clear()
        self._postponed = []
        self.computed = self.skipped = self.evaluations = 0

    def forget(self) -> None:
        """Forgets what the blocks added in its steps."""
        for branch in list(self._memories):
            self._forget(branch)

    def attach(self, hooks: HookSet) -> None:
        """Puts the hooks on, before those that cut, which must be outside of them."""
        root = self.denoiser.module
        for number, block in enumerate(self.blocks):
            run = self._around(block) if number else self._around_first(block)
            hooks.add(block.module, AroundHook(run, signature_of(block.module)), "cache")
        if self.measuring.place == "input":
            attention = self.measuring.attention_in(self.blocks[0])
            hooks.add(attention, InputHook(self._look_at_input, signature_of(attention)), "cache-input")
        hooks.add(root, InputHook(self._begin, signature_of(root)), "cache-begin")
        hooks.add(root, OutputHook(self._end), "cache-end")

    def on_computed(self, callback: Callable[[Added], None]) -> None:
        """Calls `callback` with what every list of blocks added, after each run in which all blocks ran."""
        self._on_computed.append(callback)

    def predict(self, step: int, batch: int, index: int) -> int:
        """Returns the bytes a rank sends in one call to decide whether blocks are left out.

        Args:
            step: number of the step.
            batch: samples on that rank.
            index: its place among those that hold parts of the tokens.
        """
        is_late = self.knobs.decide == "late"  # the first step has nothing to compare with
        measures = step > 0 and self._may_skip_in(step + 1) if is_late else self._may_skip_in(step)
        if self.measuring.place == "nowhere":
            return 0
        sums = 16 * self.measuring.samples(batch) * (self.denoiser.shared.size - 1) * measures
        spectrum = self.measuring.spectrum
        return sums + (spectrum.predict(batch, index) if spectrum is not None and self._is_compared_in(step) else 0)

    @property
    def postponed(self) -> Sequence[int]:
        """Lists the samples of the current call that a second run has to compute, since the first left blocks out."""
        return self._postponed

    def _begin(self, named: dict[str, Any]) -> None:
        adapter, step = self.denoiser.adapter, self.clock.step
        one = _Pass(Additions(any(named.get(name) is not None for name in adapter.residuals)))
        if self._postponed:
            one.rows, one.leaves_out, self._postponed = self._postponed, False, []
            one.first = chosen(self._pass.first, one.rows)
            self._pass = one
            return
        self._pass, self._named = one, named
        shapes = tuple(value.shape for value in tree_leaves(named) if isinstance(value, Tensor))
        known = self._memories.get(self.clock.branch)
        if known is None or known.shapes != shapes:
            self._remember(self.measuring.deciders(named), shapes)
        if self.denoiser.shared.dry:  # a dry run computes everything
            one.leaves_out = False
        elif self.knobs.mask is not None:
            self._decide([self._may_skip and self.knobs.leaves_out(step)])
        elif self.measuring.place == "nowhere":
            self._measure(None)

    def _remember(self, samples: int, shapes: tuple[Any, ...]) -> None:
        self._forget(self.clock.branch)
        forecaster = Forecaster(self.knobs.forecast, samples, self.clock.level)
        measure = self.measuring.measure(samples)
        self._memories[self.clock.branch] = _Memory(shapes, forecaster, measure, [0] * samples)

    def _forget(self, branch: int) -> None:
        """Forgets a branch, after waiting for its unread measurements."""
        memory = self._memories.pop(branch, None)
        if memory is not None and memory.measure is not None:
            memory.measure.close()

    def _end(self, output: Any) -> Any:
        one, step = self._pass, self.clock.step
        if one.reached != len(self.blocks):
            raise UnsupportedError(
                f"StepCache on {self.denoiser.adapter.model}: {one.reached} of {len(self.blocks)} blocks were "
                "called; calls that leave blocks out (skip_layers) cannot be cached, leave StepCache out"
            )
        if not one.leaves_out and not self.denoiser.shared.dry:
            self._memory.forecaster.note(one.additions.lists, step, one.rows)
            for callback in self._on_computed:
                callback(one.additions.lists)
        if not self._postponed:
            self._pass, self._named = _Pass(Additions(False)), {}
        return output

    @property
    def _memory(self) -> _Memory:
        return self._memories[self.clock.branch]

    def _around(self, block: Block) -> Callable[..., Any]:
        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
            self._pass.reached += 1
            entering = tuple(named[name] for name in block.names)
            return self._passed(block, entering) if self._pass.leaves_out else self._computed(block, forward, named)

        return run

    def _around_first(self, block: Block) -> Callable[..., Any]:
        """Runs the first block, which may have to decide for all blocks."""
        always_runs = self.measuring.place == "first_block"

        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
            one = self._pass
            one.reached += 1
            entering = tuple(named[name] for name in block.names)
            self._check_batch(entering[block.picture])
            if always_runs:
                return self._first(block, forward, named, entering)
            if one.leaves_out:
                return self._passed(block, entering)
            try:
                return self._computed(block, forward, named)
            except _SeenEnough:
                return self._passed(block, entering)

        return run

    def _check_batch(self, entering: Tensor) -> None:
        """Makes a batch decide together where samples are not the first dimension of the blocks' input.

        Raises:
            UnsupportedError: the samples of a second run differ in length from the first.
        """
        samples, shape = len(self._memory.skips), entering.shape[1:]
        if self._pass.rows is not None and shape != self._shape:
            raise UnsupportedError(
                f"StepCache on {self.denoiser.adapter.model}: some samples of this batch differ in length when run "
                "alone; call it with samples of one length, or with one at a time"
            )
        self._shape = shape
        if self._pass.rows is None and samples > 1 and len(entering) != samples:
            self.measuring.decides_together = True
            self._remember(1, self._memory.shapes)

    def _first(
        self, block: Block, forward: Callable[..., Any], named: dict[str, Any], entering: tuple[Any, ...]
    ) -> Any:
        """Runs the first block where a measure compares what it adds; it is never left out then."""
        one = self._pass
        if one.rows is None:
            one.first = self._run(block, forward, named)
            if one.leaves_out is None:
                self._measure(one.first[block.picture] - entering[block.picture])
        if one.leaves_out:
            return self._passed(block, one.first)
        one.additions.note(one.first, one.first, block.is_last)
        return as_returned(one.first)

    def _computed(self, block: Block, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        entering = tuple(named[name] for name in block.names)
        leaving = self._run(block, forward, named)
        self._pass.additions.note(entering, leaving, block.is_last)
        return as_returned(leaving)

    def _run(self, block: Block, forward: Callable[..., Any], named: dict[str, Any]) -> tuple[Any, ...]:
        output = forward(**named)
        self.evaluations += len(named[block.names[block.picture]])
        return output if isinstance(output, tuple) else (output,)

    def _passed(self, block: Block, entering: tuple[Any, ...]) -> Any:
        """Returns the output of a block that is left out; at the end of a list, with its forecast."""
        if not block.is_last:
            return as_returned(entering)
        lists = self._pass.additions.lists
        ahead = self._pass.ahead[len(lists)]
        lists.append(ahead)
        return as_returned(added_to(entering, ahead))

    def _look_at_input(self, named: dict[str, Any]) -> None:
        """Decides by the input of the first attention."""
        seen = next(iter(named.values()))
        if self.measuring.spectrum is not None:
            self.measuring.spectrum.note(seen)
        if self._pass.leaves_out is None:
            self._measure(seen)
            if self._pass.leaves_out:
                raise _SeenEnough

    @property
    def _may_skip(self) -> bool:
        return self._memory.forecaster.is_ready and self._may_skip_in(self.clock.step)

    def _may_skip_in(self, step: int) -> bool:
        """Says whether blocks may be left out in a step, given the computed steps before."""
        end = self.clock.num_steps
        return step >= self.warmup_steps and (end is None or step < end - self.knobs.keep_last)

    def _is_compared_in(self, step: int) -> bool:
        """Says whether this step or the next one reads what is measured in a step."""
        return self._may_skip_in(step) or self._may_skip_in(step + 1)

    def _measure(self, seen: Tensor | None) -> None:
        """Asks the measure for which samples to leave blocks out; the same on all ranks with parts of them."""
        memory, knobs = self._memory, self.knobs
        assert memory.measure is not None
        if seen is not None and self._is_compared_in(self.clock.step):
            seen = memory.measure.taken(seen)
        left_out, errors = [False] * len(memory.skips), list[float]()
        if self._may_skip:
            errors = memory.measure.errors(seen, self.clock.step)
            pairs = zip(errors, memory.skips, strict=True)
            left_out = [error < knobs.threshold and skips < knobs.max_skips for error, skips in pairs]
        if self._may_skip_in(self.clock.step + 1):
            memory.measure.look_ahead(seen)
        memory.measure.settle(seen, [not left for left in left_out])
        self._decide(left_out, errors)

    def _decide(self, left_out: list[bool], errors: Sequence[float] = ()) -> None:
        """Leaves the blocks of this call out for some samples, or runs them for all."""
        memory, one = self._memory, self._pass
        memory.skips = [skips + 1 if left else 0 for skips, left in zip(memory.skips, left_out, strict=True)]
        one.leaves_out = any(left_out)
        self._postponed = [row for row, left in enumerate(left_out) if not left] if one.leaves_out else []
        if one.leaves_out:
            one.ahead = memory.forecaster.at(self.clock.step)
        if all(left_out):
            self.clock.leave_out()
        total = len(self._named[self.denoiser.adapter.sample])
        each = tuple(left_out) if len(left_out) == total else (left_out[0],) * total
        self.decisions.append(Decision(self.clock.step, self.clock.branch, each, tuple(errors)))
        self.skipped += sum(each)
        self.computed += total - sum(each)
