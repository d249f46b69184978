"""One rank's run of a model's blocks, on the tokens of one patch at a time.

The model's own forward runs on every rank, but only the rank's own blocks compute. The others hand on what they were
given, so everything around them (embeddings, rotations, the last projection, which cost next to nothing) is the
model's own code. What enters the first own block is replaced by what the stage before sent, and what enters the first
block after the last own one is sent on.
"""

from __future__ import annotations

import contextvars
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel.adapters import Adapter, Split
from partsong.parallel.clock import StepClock
from partsong.parallel.hooks import AroundHook, HookSet, map_sample, sample_of
from partsong.parallel.mesh import Axis, Mesh
from partsong.parallel.sequence import AttentionCall, SequenceParallel, attend_locally
from partsong.parallel.shards import offsets, split_sizes

if TYPE_CHECKING:
    from partsong.parallel.patch_pipeline import PatchPipeline

__all__ = ["Layout", "StagedBlocks"]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a call of the model looks like from outside its blocks, learned without running any.

    A part is the number of a patch, or None for the whole picture.

    Attributes:
        output: what the model returns; its sample holds, at every position, the number of the patch it belongs to.
        positions: for each patch, its positions in one flattened sample.
        inputs: for each part, shape and type of what enters each stage's first block.
    """

    output: Any
    positions: tuple[Tensor, ...]
    inputs: Mapping[int | None, Sequence[tuple[Tensor, ...]]]

    @property
    def owners(self) -> Tensor:
        """The patch of every position of a sample, `[B, ...]` like the sample."""
        return sample_of(self.output)

    def read(self, sample: Tensor, part: int | None) -> Tensor:
        """The positions of a part, `[B, n]`."""
        flat = sample.flatten(1)
        return (flat if part is None else flat[:, self.positions[part]]).contiguous()

    def write(self, sample: Tensor, part: int | None, values: Tensor) -> None:
        """Overwrites the positions of a part with `[B, n]`."""
        where = slice(None) if part is None else self.positions[part]
        sample.view(len(sample), -1)[:, where] = values

    def returned(self, sample: Tensor) -> Any:
        """What the model would return with this sample."""
        return map_sample(self.output, lambda _: sample)

    def empty_output(self, part: int | None) -> Tensor:
        """Room for a part of the sample."""
        count = self.owners[0].numel() if part is None else len(self.positions[part])
        return self.owners.new_empty((len(self.owners), count))

    def empty_input(self, part: int | None, stage: int) -> Tensor:
        """Room for what enters a stage, in one piece."""
        tensors = self.inputs[part][stage]
        return torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=self.owners.device)


@dataclass(slots=True)
class _KeyValues:
    """Keys and values of the whole picture for one attention, patch after patch, and their mask `[B, 1, 1, S]`."""

    k: Tensor
    v: Tensor
    mask: Tensor | None


class StagedBlocks(SequenceParallel):
    """The blocks of one rank in a pipeline of stages.

    Args:
        module: the transformer.
        adapter: its row, resolved.
        mesh: the ranks; those of axis ``pipe`` are the stages in order.
        clock: its step and branch are those of the patch at work.
        strategy: the knobs.

    Raises:
        UnsupportedError: a model whose blocks hand on more than tokens, or that cannot be cut into patches.
        ArgumentError: the stages do not add up to the model's blocks.
    """

    parts_name = "patches"

    def __init__(
        self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock, strategy: PatchPipeline
    ) -> None:
        super().__init__(module, adapter, mesh, ())
        self.pipe, self.clock, self.warmup_steps = mesh.axis("pipe"), clock, strategy.warmup_steps
        self.num_patches = strategy.num_patches or self.pipe.size
        self.blocks = _blocks(module, adapter)
        sizes = _stage_sizes(adapter, strategy.layers, len(self.blocks), self.pipe.size)
        self.starts = offsets(sizes)
        self.own = range(self.starts[self.pipe.index], self.starts[self.pipe.index] + sizes[self.pipe.index])
        self.last_layout: Layout | None = None
        self._layouts: dict[Any, Layout] = {}
        self._filled: dict[int, Layout] = {}
        self._cache: dict[tuple[int, int], _KeyValues] = {}
        self._received: list[Tensor] | None = None
        self._entering: dict[int, tuple[Tensor, ...]] = {}
        self._reached, self._learning = 0, False

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.pipe.index == self.pipe.size - 1

    def attach(self, hooks: HookSet) -> None:
        """Puts the hooks on the blocks, and those that cut and attend."""
        # Innermost: a block that is left out still has its inputs cut, so what it hands on has the right shape.
        for number, (_, block, names) in enumerate(self.blocks):
            hooks.add(block, AroundHook(self._around(number, names), inspect.signature(block.forward)), "block")
        super().attach(hooks)

    def forget(self) -> None:
        """Drops what belongs to one generation."""
        for held in (self._layouts, self._filled, self._cache, self._entering):
            held.clear()

    def layout(self, named: Mapping[str, Any]) -> Layout:
        """What a call with such arguments looks like; learned once per set of shapes.

        Raises:
            UnsupportedError: the picture cannot be cut into patches.
        """
        key = tuple((name, _shape_of(value)) for name, value in named.items() if name != self.adapter.timestep)
        if key not in self._layouts:
            self._layouts[key] = self._learn(named)
        return self._layouts[key]

    def _learn(self, named: Mapping[str, Any]) -> Layout:
        inputs: dict[int | None, list[tuple[Tensor, ...]]] = {}
        output: Any = None
        self._learning = True
        try:
            for part in (None, *range(self.num_patches)):
                # In a context of its own no ledger is active: nothing is computed here that a step would count.
                output = contextvars.Context().run(self._forward, named, part)
                inputs[part] = [
                    tuple(torch.empty_like(tensor, device="meta") for tensor in self._entering[start])
                    for start in self.starts
                ]
        finally:
            self._learning = False
        owners = sample_of(output)[0].flatten()
        positions = tuple((owners == part).nonzero().flatten() for part in range(self.num_patches))
        if sum(map(len, positions)) != len(owners):
            raise UnsupportedError(
                f"{self.adapter.model}: its output is not its last tokens in another order, so no patch of it can be "
                "told from another; use Ulysses or DisplacedPatch"
            )
        return Layout(output, positions, inputs)

    def work(self, named: Mapping[str, Any], layout: Layout, part: int | None, received: Tensor | None) -> Tensor:
        """This rank's blocks on one part.

        Args:
            named: arguments of the model's call.
            layout: of that call.
            part: number of the patch; None is the whole picture.
            received: what the stage before sent; None in the first.

        Returns:
            What the next stage needs, in one piece; in the last one the part's positions of the sample, `[B, n]`.
        """
        index = self.pipe.index
        if received is not None:
            tensors = layout.inputs[part][index]
            pieces = received.split([tensor.numel() for tensor in tensors])
            self._received = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
        self.last_layout = layout
        output = self._forward(named, part)
        if part is None and self.clock.step == self.warmup_steps - 1:
            self._filled[self.clock.branch] = layout
        if self.is_last:
            return layout.read(sample_of(output), part)
        leaving = self._entering[self.starts[index + 1]]
        for got, wanted in zip(leaving, layout.inputs[part][index + 1], strict=True):
            if got.shape != wanted.shape or got.dtype != wanted.dtype:
                raise UnsupportedError(
                    f"{self.adapter.model}: blocks turn {list(wanted.shape)} of {wanted.dtype} into {list(got.shape)} "
                    f"of {got.dtype}; only blocks that keep shape and type can be staged"
                )
        return torch.cat([tensor.flatten() for tensor in leaving])

    def check_filled(self, layout: Layout, step: int, branch: int) -> None:
        """Refuses, on all ranks alike, a call after the warm-up that the warm-up's last step did not make."""
        if self.num_patches > 1 and self._filled.get(branch) is not layout:
            raise UnsupportedError(
                f"PatchPipeline: call {branch + 1} of step {step + 1} has no counterpart of the same shape in step "
                f"{self.warmup_steps}, the last of the warm-up, so there are no keys to read; "
                f"use warmup_steps={step + 1} or more"
            )

    def _forward(self, named: Mapping[str, Any], part: int | None) -> Any:
        parts = 1 if part is None else self.num_patches
        self.axis = Axis(self.parts_name, tuple(range(parts)), part or 0)
        self._reached = 0
        output = self.module(**named)
        self._received = None
        if self._reached != len(self.blocks):
            raise UnsupportedError(
                f"{self.adapter.model}: {self._reached} of {len(self.blocks)} blocks were called; calls that leave "
                "blocks out (skip_layers) cannot be staged, use Ulysses or DisplacedPatch"
            )
        return output

    def _around(self, number: int, names: tuple[str, ...]) -> Callable[..., Any]:
        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
            self._reached += 1
            if number in self.starts:
                self._entering[number] = tuple(named[name] for name in names)
            if self._learning or number not in self.own:
                given = tuple(named[name] for name in names)
                return given if len(names) > 1 else given[0]
            if number == self.own.start and self._received is not None:
                named.update(zip(names, self._received, strict=True))
            output = forward(**named)
            returned = output if isinstance(output, tuple) else (output,)
            if len(returned) != len(names):
                raise UnsupportedError(
                    f"{self.adapter.model}: block {self.blocks[number][0]} returns {len(returned)} values where "
                    f"{' and '.join(names)} are expected; its layout has changed"
                )
            return output

        return run

    def _gather(self, output: Tensor, name: str, cut: Split) -> Tensor:
        """This part's rows among those of the whole; the numbers of the patches while learning."""
        sizes = self.sizes[cut.stream]
        if len(sizes) == 1 and not self._learning:
            return output
        moved = output.movedim(cut.dim, 0)
        whole = moved.new_zeros((sum(sizes), *moved.shape[1:]))
        for part, (start, size) in enumerate(zip(offsets(sizes), sizes, strict=True)):
            if self._learning:
                whole[start : start + size] = part
            elif part == self.axis.index:
                whole[start : start + size] = moved
        return whole.movedim(0, cut.dim)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of a part's queries to the keys and values of the whole picture."""
        key, own = (call.layer, self.clock.branch), None if call.masks is None else call.masks[0]
        if len(call.sizes) == 1:
            if self.clock.step == self.warmup_steps - 1 and self.num_patches > 1:
                order = self._order(self.layers[call.layer][1], call.k.device)
                k, v = call.k.index_select(2, order), call.v.index_select(2, order)
                self._cache[key] = _KeyValues(k, v, None if own is None else own.index_select(3, order))
            return attend_locally(call)
        held = self._cache[key]
        start = offsets(call.sizes)[call.index]
        rows = slice(start, start + call.sizes[call.index])
        held.k[:, :, rows], held.v[:, :, rows] = call.k, call.v
        masks = None
        if own is not None and held.mask is not None:
            held.mask[..., rows] = own
            masks = (held.mask,)
        return attend_locally(replace(call, k=held.k, v=held.v, sizes=(sum(call.sizes),), index=0, masks=masks))

    def _order(self, streams: tuple[str, ...], device: torch.device) -> Tensor:
        """Where, in one sequence of all streams, the tokens of each patch are."""
        totals = [sum(self.sizes[stream]) for stream in streams]
        runs = [torch.arange(t, device=device) + start for t, start in zip(totals, offsets(totals), strict=True)]
        cut = [run.split(split_sizes(len(run), self.num_patches)) for run in runs]
        return torch.cat(list(itertools.chain.from_iterable(zip(*cut, strict=True))))

    def _whole_masks(self, rows: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The mask of this part; that of the others is kept with their keys."""
        return (rows[:, None, None],)

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Bytes the stage at `index` sends in one call of the model: to the next, or the output to all others."""
        assert self.last_layout is not None
        if index == self.pipe.size - 1:
            owners = self.last_layout.owners
            return owners.numel() * owners.element_size() * (self.pipe.size - 1)
        return sum(tensor.numel() * tensor.element_size() for tensor in self.last_layout.inputs[None][index + 1])


def _shape_of(value: Any) -> Any:
    """What of an argument decides how a call looks; hashable."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _shape_of(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape_of, value))
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value)


def _blocks(module: nn.Module, adapter: Adapter) -> list[tuple[str, nn.Module, tuple[str, ...]]]:
    """Name, module, and the arguments that are handed on, for every block in order of execution."""
    # Where nothing else is said, self-attention over the picture names the lists of blocks, which return one value.
    lists = adapter.blocks or {path.partition(".")[0]: ("hidden_states",) for path in adapter.attention}
    blocks = []
    for name, names in lists.items():
        children = getattr(module, name, None)
        if not isinstance(children, nn.ModuleList):
            raise UnsupportedError(f"PatchPipeline: {adapter.model} has no list of blocks {name!r} here; use Ulysses")
        blocks += [(f"{name}.{number}", block, names) for number, block in enumerate(children)]
    return blocks


def _stage_sizes(adapter: Adapter, layers: tuple[int, ...] | None, blocks: int, stages: int) -> tuple[int, ...]:
    if layers is None:
        if blocks < stages:
            raise ArgumentError(f"PatchPipeline: {blocks} blocks of {adapter.model} cannot be {stages} stages")
        return split_sizes(blocks, stages)
    if len(layers) != stages or sum(layers) != blocks:
        raise ArgumentError(
            f"PatchPipeline: layers={layers} are {len(layers)} stages of {sum(layers)} blocks; {adapter.model} has "
            f"{blocks} blocks and there are {stages} ranks"
        )
    return layers
