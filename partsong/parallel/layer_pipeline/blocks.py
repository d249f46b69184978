"""Runs one rank's blocks of a denoiser on the samples of a batch, one after another, while others run theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.batch import with_whole
from partsong.parallel.cuts.batch_rules import BatchRules
from partsong.parallel.cuts.block_lists import READ_FROM_OUTSIDE, blocks_of
from partsong.parallel.cuts.handed_on import check_returned
from partsong.parallel.cuts.relay import Relay
from partsong.parallel.cuts.stacked_branches import branches_apart
from partsong.parallel.cuts.stage_sizes import stage_sizes
from partsong.parallel.hooks.dropped_weights import drop_weights
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, signature_of
from partsong.parallel.hooks.samples import map_samples, samples_of
from partsong.parallel.protocols import Cut, Shards
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.pieces import WeightPiece

__all__ = ["LayerWeights", "PipelinedBlocks"]


@dataclass(frozen=True, slots=True)
class _Passes:
    """Describes what passed between ranks in one call.

    Attributes:
        batch: its samples.
        moved: bytes from a rank to a rank, by their indices.
        owner: index of the rank that ran the last block.
        returned: bytes of what the model returned.
    """

    batch: int
    moved: Mapping[tuple[int, int], int]
    owner: int
    returned: int


class PipelinedBlocks(Cut):
    """Runs the blocks of one rank, and hands on what leaves them.

    Every rank goes through the model's own forward once for each sample, but blocks of other ranks pass on their input.
    A rank that has handed a sample on does not wait for it: it goes on with the next one, of this call or, in
    `together`, of the next one.

    Args:
        module: the transformer.
        adapter: its row.
        axis: the ranks, which have the blocks in order.
        layers: blocks of each rank; None distributes them evenly.

    Raises:
        UnsupportedError: the model has no list of blocks.
        ArgumentError: they cannot be shared out like this.
    """

    overlaps = True

    def __init__(self, module: nn.Module, adapter: Adapter, axis: Axis, layers: tuple[int, ...] | None) -> None:
        self.module, self.model, self.sample = module, adapter.model, adapter.sample
        self.axis, self.sizes = axis, dict[str, tuple[int, ...]]()
        self.blocks, self.rules = blocks_of(module, adapter), BatchRules.of(adapter)
        self.owners = _owners(adapter.model, layers, len(self.blocks), self.axis.size)
        self._relay = Relay(axis, f"states of a stage of {adapter.model}")
        self._last = _Passes(1, {}, self.axis.size - 1, 0)
        self._uncut: str | None = None
        self._postponed: list[_Passes] | None = None  # calls whose results nobody has asked for yet
        self._in_flight = 1

    def attach(self, hooks: HookSet) -> None:
        """Puts the hooks on the blocks and on the model."""
        for number, block in enumerate(self.blocks):
            hooks.add(block.module, AroundHook(self._around(number), signature_of(block.module)), "block")
        hooks.add(self.module, AroundHook(self._run, signature_of(self.module)), "stages")

    def begin_forward(self, sample: Any) -> None:
        """Does nothing: the call itself counts its samples."""

    def abandon(self) -> None:
        """Drops pending messages without waiting, after an error."""
        self._relay.abandon()

    def _run(self, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        """Makes one call of the model, a sample at a time."""
        total = len(named[self.sample])
        self._relay.moved.clear()
        parts = self._samples(named, total)

        def run(number: int) -> Any:
            if len(parts) == 1:
                return forward(**named)
            with branches_apart(self.module, slice(number, number + 1), total):
                return forward(**parts[number])

        outputs = self._relay.through(range(len(parts)), run)
        output = outputs[0] if len(parts) == 1 else with_whole(_joined(outputs), parts[-1], named)
        returned = sum(part.nbytes for part in samples_of(output))
        self._last = _Passes(total, dict(self._relay.moved), self._relay.owner or 0, returned)
        if self._postponed is not None:
            self._postponed.append(self._last)
            return output
        return self._shared([output], [self._last])[0]

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Makes several calls, whose samples go through the ranks one after another, and then shares the results."""
        self._postponed = passes = []
        try:
            outputs = [call() for call in calls]
        finally:
            self._postponed = None
        return self._shared(outputs, passes)

    def _shared(self, outputs: list[Any], passes: list[_Passes]) -> list[Any]:
        """Sends every rank the outputs of calls, and waits for all that this rank has sent."""
        self._in_flight = sum(each.batch for each in passes)
        owners = [each.owner for each in passes]
        return self._relay.share(owners, outputs, name=f"output of {self.model}")

    def _samples(self, named: dict[str, Any], total: int) -> list[dict[str, Any]]:
        """Returns the arguments of every sample; those of all at once where it is not known how to cut them."""
        self._uncut = None
        if total == 1:
            return [named]
        try:
            return [self.rules.cut(named, slice(number, number + 1), total) for number in range(total)]
        except UnsupportedError as problem:
            self._uncut = str(problem)
            return [named]

    def _around(self, number: int) -> Callable[..., Any]:
        """Returns what takes the place of a block's call."""
        block, owner = self.blocks[number], self.owners[number]

        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
            given = self._relay.enter(owner, tuple(named[name] for name in block.names))
            named.update(zip(block.names, given, strict=True))
            if owner != self.axis.index:
                return given if len(block.names) > 1 else given[0]
            output = forward(**named)
            check_returned(self.model, block.name, output, block.names)
            return output

        return run

    def call_notes(self) -> _Passes:
        """Returns what passed between ranks in the last call."""
        return self._last

    def recall(self, notes: Any) -> None:
        """Prepares `predict` for a call like that one."""
        self._last = self._last if notes is None else notes

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes the rank at `index` sends in one call."""
        last = self._last
        sent = sum(count for (sender, _), count in last.moved.items() if sender == index)
        sent += last.returned * (self.axis.size - 1) if index == last.owner else 0
        return sent * batch // last.batch

    def describe(self, tokens: Mapping[str, int]) -> str:
        """Says how many samples are under way at a time."""
        if self._uncut is not None:
            return f"all samples of a call at once ({self._uncut}), so that one rank works at a time,"
        if self._in_flight == 1:
            return "one sample at a time, so that one rank works at a time,"
        return f"{self._in_flight} samples in flight"


class LayerWeights(Shards):
    """Leaves a rank the weights of its own blocks, and of layers outside of blocks.

    Args:
        module: the transformer.
        adapter: its row.
        axis: the ranks, which have the blocks in order.
        layers: blocks of each rank; None distributes them evenly.
        lent: modules that another part of the pipeline calls by itself; their weights stay on every rank.
    """

    axes = ("pipe",)
    stays_cut = True

    def __init__(
        self,
        module: nn.Module,
        adapter: Adapter,
        axis: Axis,
        layers: tuple[int, ...] | None,
        lent: Collection[nn.Module],
    ) -> None:
        self.axis, blocks = axis, blocks_of(module, adapter)
        self.owners, outside = _owners(adapter.model, layers, len(blocks), axis.size), READ_FROM_OUTSIDE
        self._dropped = [
            block.module
            for number, (owner, block) in enumerate(zip(self.owners, blocks, strict=True))
            if owner != axis.index and block.module not in lent and outside.get(adapter.model) != number
        ]
        self._pieces: dict[tuple[nn.Module, str], WeightPiece] = {}

    def attach(self, hooks: HookSet) -> None:
        """Drops the weights of the blocks of other ranks."""
        for layer in self._dropped:
            self._pieces |= drop_weights(layer, hooks)

    def begin_forward(self, batch: int, cut: Cut | None) -> None:
        """Does nothing: nothing is gathered."""

    def call_notes(self) -> None:
        """Returns None: weights are never sent."""

    def predict(self, notes: Any, batch: int, place: int, index: int) -> int:
        """Returns 0: weights are never sent."""
        return 0

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Says which part of a weight this rank holds; None where it holds all."""
        return self._pieces.get((part, name))

    def describe(self) -> str:
        """Says how many blocks each rank has."""
        counts = (str(self.owners.count(rank)) for rank in range(self.axis.size))
        return f"{' + '.join(counts)} blocks with their weights"


def _owners(model: str, layers: tuple[int, ...] | None, blocks: int, ranks: int) -> list[int]:
    """Returns the rank of every block, by its index."""
    return [rank for rank, count in enumerate(stage_sizes(model, layers, blocks, ranks)) for _ in range(count)]


def _joined(outputs: list[Any]) -> Any:
    """Returns one output for the samples of several."""
    columns = zip(*map(samples_of, outputs), strict=True)
    return map_samples(outputs[-1], lambda _: torch.cat(next(columns)))
