"""Lets every run of a model's blocks start from the previous run's result of a step ago, so all compute at once."""

from __future__ import annotations

import contextvars
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.knobs import Count
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.block_lists import blocks_of, runs_reason
from partsong.parallel.cuts.handed_on import check_returned, hand_on, share_output
from partsong.parallel.exchange.displaced_patch import WarmUp
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, signature_of
from partsong.parallel.hooks.samples import samples_of
from partsong.parallel.ranks.collectives import Pending
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.ranks.shards import offsets, split_sizes
from partsong.parallel.strategy import Cut, Kind, Strategy

__all__ = ["LaggedBlocks", "LaggedLayers"]

#: How a step computes the model's answer.
_Phase = Literal["exact", "lagged", "again"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaggedLayers(Strategy):
    """Gives each rank a run of the model's blocks, which starts from what the run before it returned a step ago.

    So no rank waits for another inside a step. The depth of the model is spread over steps: with N runs, a prediction
    depends on the latents of the last N steps. A run starts from this step's own embedding plus what the blocks before
    it added a step ago. Only the inputs of runs pass between neighbours, while the next step begins, and the prediction
    goes to all. Guidance keeps all its branches. The result depends on `components` but
    not on the number of ranks, to the last bit. Approximate; with ``warmup_steps`` at or above the number of steps it
    is exact (and no faster than one rank).

    Use it when links are slow, steps are many, and two ranks can each take half of the blocks.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        components: runs of blocks, assigned to the ranks in order; None means one per rank, and two on one rank.
        stride: one in this many lagged steps is computed. The steps between take the last prediction.
        warmup_steps: first steps in which the runs compute one after the other; at least 1.
        window: number of lagged steps after these; the rest is computed like the warm-up. None lags to the end.
        order: 0 reads what was added a step ago as it is, 1 extrapolates it from the last two steps. None extrapolates
            only with two runs: with more, runs would extrapolate results of extrapolations.

    Source: AsyncDiff, arXiv 2406.06911; here embeddings are fresh, and old values are extrapolated.

    Example:
        >>> LaggedLayers(components=2).kind
        'approximate'
    """

    axes: ClassVar[tuple[str, ...]] = ("pipe",)
    kind: ClassVar[Kind] = "approximate"
    cuts_blocks: ClassVar[bool] = True
    reads_last_step: ClassVar[bool] = True

    degree: Count | None = None
    components: Count | None = None
    stride: Count = 1
    warmup_steps: WarmUp = 4
    window: Count | None = None
    order: Literal[0, 1] | None = None

    def stale(self) -> str:
        """Says what is old."""
        until = "" if self.window is None else f" and for {self.window} steps"
        return f"after {self.warmup_steps} steps{until}, a run of blocks reads what those before it added a step ago"

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models whose blocks are not one chain."""
        reason = runs_reason(adapter)
        return None if reason is None else f"{reason}; {adapter.instead}"

    def composes(self, other: Strategy) -> bool:
        """Says that guidance and samples may be shared out as well."""
        return bool(other.axes) and set(other.axes) <= {"cfg", "data"}

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> LaggedBlocks:
        """Returns the runs of this rank; a single rank has all of them, and they lag as well.

        Raises:
            UnsupportedError: the model's blocks are not one chain.
            ArgumentError: there are more runs than blocks, or more ranks than runs.
        """
        if (reason := self.refuses(adapter)) is not None:
            raise UnsupportedError(f"LaggedLayers on {adapter.model}: {reason}")
        return LaggedBlocks(module, adapter, mesh, clock, self)


@dataclass(slots=True)
class _Kept:
    """Holds what the blocks before a run added in a step.

    Attributes:
        step: the step.
        tensors: what they have added, or what enters the run while `base` is not subtracted.
        base: what would enter if they had added nothing; None where it is subtracted.
        pending: the message with the tensors; None once they are there.
    """

    step: int
    tensors: tuple[Tensor, ...]
    base: tuple[Tensor, ...] | None
    pending: Pending | None = None

    def added(self) -> tuple[Tensor, ...]:
        """Waits for what was added, and returns it."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        if self.base is not None:
            self.tensors = tuple(value - base for value, base in zip(self.tensors, self.base, strict=True))
            self.base = None
        return self.tensors


@dataclass(slots=True)
class _Branch:
    """Remembers the last steps of one branch of guidance.

    Attributes:
        added: for each run, what the blocks before it have added in the last steps, newest last.
        output: the last prediction.
    """

    added: dict[int, list[_Kept]] = field(default_factory=dict)
    output: Any = None


class LaggedBlocks(Cut):
    """Runs the blocks of one rank.

    Every rank goes through the model's own forward, but blocks of other ranks pass on their input.

    Args:
        module: the transformer.
        adapter: its row.
        mesh: the ranks; those of axis ``pipe`` share the runs in order.
        clock: tells step and branch.
        knobs: says how many runs there are and when they lag.

    Raises:
        ArgumentError: there are more runs than blocks, or more ranks than runs.
    """

    varies = True

    def __init__(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock, knobs: LaggedLayers) -> None:
        self.module, self.model, self.clock, self.knobs = module, adapter.model, clock, knobs
        self.axis, self.sizes = mesh.axis("pipe"), dict[str, tuple[int, ...]]()
        self.blocks, ranks = blocks_of(module, adapter), self.axis.size
        self.components = knobs.components or max(2, ranks)
        if self.components > len(self.blocks):
            raise ArgumentError(
                f"LaggedLayers: {len(self.blocks)} blocks of {self.model} cannot be {self.components} runs; "
                f"use at most {len(self.blocks)}"
            )
        if ranks > self.components:
            raise ArgumentError(f"LaggedLayers: {ranks} ranks for {self.components} runs; use components={ranks}")
        lengths = split_sizes(len(self.blocks), self.components)
        dealt = split_sizes(self.components, ranks)
        self.owners = [rank for rank, size in enumerate(dealt) for _ in range(size)]
        self.starts = {start: run for run, start in enumerate(offsets(lengths)) if run}
        run_of = [run for run, size in enumerate(lengths) for _ in range(size)]
        self.own = {number for number, run in enumerate(run_of) if self.owners[run] == self.axis.index}
        self.order = int(self.components == 2) if knobs.order is None else knobs.order
        mine = [start for start, run in self.starts.items() if self.owners[run] == self.axis.index]
        # Blocks of this rank come before one of its own runs, so the input of that run is not just the embedding.
        self._asks_bases = any(number < start for number in self.own for start in mine)
        self._bases: dict[int, tuple[Tensor, ...]] = {}
        self._is_learning = False
        self._branches: dict[int, _Branch] = {}
        self._phase: _Phase = "exact"
        self._sent: list[Pending] = []
        self._reached, self._batch = 0, 1
        self._row_bytes: dict[int, int] = {}
        self._output_bytes = 0
        clock.on_begin(self._forget)
        clock.on_end(self._forget)
        clock.on_change(self._forget_branch)

    def attach(self, hooks: HookSet) -> None:
        """Puts the hooks on the blocks and on the model."""
        for number, block in enumerate(self.blocks):
            signature = signature_of(block.module)
            hooks.add(block.module, AroundHook(self._around(number, block.names), signature), "block")
        hooks.add(self.module, AroundHook(self._run, signature_of(self.module)), "lagged")

    def begin_forward(self, sample: Any) -> None:
        """Notes how many samples there are."""
        self._batch = len(sample)

    def phase(self, step: int) -> _Phase:
        """Returns how a step is computed, by the knobs."""
        lag = step - self.knobs.warmup_steps
        if lag < 0 or (self.knobs.window is not None and lag >= self.knobs.window):
            return "exact"
        return "again" if lag % self.knobs.stride else "lagged"

    def feeds(self, step: int) -> bool:
        """Says whether the input of a run in a lagged step is read in a later one."""
        later = step + self.knobs.stride
        return self.phase(later) == "lagged" and later < (self.clock.num_steps or math.inf)

    def _forget(self) -> None:
        """Drops what belongs to the last generation, once its messages have arrived."""
        for pending in self._sent:
            pending.wait()
        self._sent.clear()
        for branch in list(self._branches):
            self._forget_branch(branch)

    def _forget_branch(self, branch: int) -> None:
        """Drops what was kept for calls of another shape; the next call is computed like the warm-up."""
        dropped = self._branches.pop(branch, _Branch())
        for kept in (each for runs in dropped.added.values() for each in runs):
            kept.added()

    def abandon(self) -> None:
        """Drops pending messages without waiting, after an error."""
        self._sent.clear()
        self._branches.clear()

    def _run(self, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        branch = self._branches.get(self.clock.branch)
        self._phase = self.phase(self.clock.step) if branch is not None else "exact"
        if branch is None:
            branch = self._branches[self.clock.branch] = _Branch()
        if self._phase == "again":
            return branch.output
        for pending in self._sent:
            pending.wait()
        self._sent.clear()
        if self._asks_bases:
            self._learn_bases(forward, named)
        self._reached = 0
        output = forward(**named)
        if self._reached != len(self.blocks):
            raise UnsupportedError(
                f"LaggedLayers on {self.model}: {self._reached} of {len(self.blocks)} blocks were called; calls that "
                "leave blocks out (skip_layers) cannot lag, use Ulysses or DisplacedPatch"
            )
        output = self._shared(output)
        branch.output = output if self.knobs.stride > 1 else None
        return output

    def _learn_bases(self, forward: Callable[..., Any], named: dict[str, Any]) -> None:
        """Runs the model without its blocks, to learn the inputs of the runs if nothing is added."""
        self._is_learning = True
        try:
            # In a context of its own no ledger is active: nothing is computed here that a step would count.
            contextvars.Context().run(lambda: forward(**named))
        finally:
            self._is_learning = False

    def _around(self, number: int, names: tuple[str, ...]) -> Callable[..., Any]:
        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
            self._reached += 1
            given = tuple(named[name] for name in names)
            if self._is_learning:
                if number in self.starts:
                    self._bases[self.starts[number]] = given
            else:
                if number in self.starts:
                    given = self._cross(self.starts[number], given)
                    named.update(zip(names, given, strict=True))
                if number in self.own:
                    output = forward(**named)
                    check_returned(self.model, self.blocks[number].name, output, names)
                    return output
            return given if len(names) > 1 else given[0]

        return run

    def _cross(self, run: int, fresh: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Takes the output of the previous run, and returns the input of this one."""
        added = self._branches[self.clock.branch].added.setdefault(run, [])
        is_mine, base = self.owners[run] == self.axis.index, self._bases.pop(run, fresh)
        self._row_bytes[run] = sum(tensor.nbytes for tensor in fresh) // self._batch
        if self._phase == "exact":
            values, pending = self._passed(run, fresh)
            if is_mine:
                kept = _Kept(self.clock.step, values, base, pending)
                kept.added()
                self._keep(added, kept)
            return values
        given = self._forecast(added, base) if is_mine else fresh
        if self.feeds(self.clock.step):
            values, pending = self._passed(run, fresh)
            if is_mine:
                self._keep(added, _Kept(self.clock.step, values, base, pending))
        return given

    def _keep(self, added: list[_Kept], newest: _Kept) -> None:
        added.append(newest)
        del added[: -1 - self.order]

    def _passed(self, run: int, fresh: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Pending | None]:
        """Sends the input of a run to its rank; returns it, and the message."""
        sender, receiver = self.owners[run - 1], self.owners[run]
        if sender == receiver:
            return fresh, None
        values, pending = hand_on(self.axis, sender, receiver, fresh, name=f"lagged layers of {self.model}")
        if self.axis.index == receiver:
            return values, pending
        self._sent.append(pending)
        return fresh, None

    def _forecast(self, added: list[_Kept], base: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Forecasts the input of a run from what was added before it in the last steps."""
        last = added[-1].added()
        ratio = self.clock.reach(added[0].step, added[-1].step) if len(added) > 1 else None
        if ratio is not None:
            last = tuple(torch.lerp(old, new, 1 + ratio) for old, new in zip(added[0].added(), last, strict=True))
        return tuple(value + change for value, change in zip(base, last, strict=True))

    def _shared(self, output: Any) -> Any:
        """Sends every rank the output of the last run."""
        self._output_bytes = sum(part.nbytes for part in samples_of(output)) // self._batch
        return share_output(self.axis, self.axis.size - 1, output, name=f"output of lagged layers of {self.model}")

    def call_notes(self) -> tuple[Mapping[int, int], int]:
        """Returns the bytes per sample of each run's input, and of the output."""
        return dict(self._row_bytes), self._output_bytes

    def recall(self, notes: Any) -> None:
        """Prepares `predict` for a call with those bytes."""
        if notes is not None:
            self._row_bytes, self._output_bytes = dict(notes[0]), notes[1]

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes the rank at `index` sends in one call of a step."""
        phase = self.phase(step[0])
        if phase == "again":
            return 0
        sent = self._output_bytes * (self.axis.size - 1) if index == self.axis.size - 1 else 0
        if phase == "exact" or self.feeds(step[0]):
            pairs = enumerate(itertools.pairwise(self.owners), 1)
            sent += sum(self._row_bytes[run] for run, (sender, own) in pairs if index == sender != own)
        return sent * batch

    def describe(self, tokens: Mapping[str, int]) -> str:
        """Says what is cut."""
        return f"{len(self.blocks)} blocks in {self.components} runs"
