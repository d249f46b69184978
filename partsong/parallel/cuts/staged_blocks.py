"""Runs one rank's share of a model's blocks on the tokens of one part at a time.

The model's own forward runs on every rank, but only the rank's own blocks compute. The others pass on what they were
given, so everything around them (embeddings, rotations, the last projection, which cost next to nothing) is the
model's own code. The input of the first own block is replaced by what the stage before sent, and the input of the
first block after the last own one is sent on.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter, Split
from partsong.parallel.adapters.row import JOINT
from partsong.parallel.cuts.block_lists import blocks_of, chain_only
from partsong.parallel.cuts.handed_on import check_returned
from partsong.parallel.cuts.stage_sizes import stage_sizes
from partsong.parallel.cuts.tokens import SequenceParallel
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, signature_of
from partsong.parallel.hooks.samples import map_sample, sample_of
from partsong.parallel.ranks.mesh import Axis, Mesh
from partsong.parallel.ranks.shards import offsets, split_sizes

__all__ = ["PartLayout", "StagedBlocks"]


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Describes a call of the model as seen from outside its blocks, learned without running any.

    A part is the number of a patch, or None for the whole picture.

    Attributes:
        output: what the model returns; its sample holds, at every position, the number of the patch it belongs to.
        positions: for each patch, its positions in one flattened sample.
        inputs: for each part, shape and type of what enters each stage's first block.
        picture: the picture's tokens in the one sequence that the model joins; None where streams stay apart.
    """

    output: Any
    positions: tuple[Tensor, ...]
    inputs: Mapping[int | None, Sequence[tuple[Tensor, ...]]]
    picture: range | None = None

    @property
    def owners(self) -> Tensor:
        """Returns the patch of every position of a sample, `[B, ...]` like the sample."""
        return sample_of(self.output)

    def read(self, sample: Tensor, part: int | None) -> Tensor:
        """Reads the positions of a part, `[B, n]`."""
        flat = sample.flatten(1)
        return (flat if part is None else flat[:, self.positions[part]]).contiguous()

    def write(self, sample: Tensor, part: int | None, values: Tensor) -> None:
        """Overwrites the positions of a part with `[B, n]`."""
        where = slice(None) if part is None else self.positions[part]
        sample.view(len(sample), -1)[:, where] = values

    def returned(self, sample: Tensor) -> Any:
        """Returns what the model would return with this sample."""
        return map_sample(self.output, lambda _: sample)

    def empty_output(self, part: int | None) -> Tensor:
        """Allocates room for a part of the sample."""
        count = self.owners[0].numel() if part is None else len(self.positions[part])
        return self.owners.new_empty((len(self.owners), count))

    def empty_input(self, part: int | None, stage: int) -> Tensor:
        """Allocates room for the input of a stage, in one piece."""
        tensors = self.inputs[part][stage]
        return torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=self.owners.device)


class StagedBlocks(SequenceParallel):
    """Holds the blocks of one rank in a pipeline of stages.

    Args:
        module: the transformer.
        adapter: its row, resolved.
        mesh: the ranks; those of axis ``pipe`` are the stages in order.
        layers: blocks of each stage; None distributes them evenly.
        num_patches: parts that travel one after another.

    Raises:
        UnsupportedError: the model's blocks pass on more than tokens, or it cannot be cut into patches.
        ArgumentError: the stages do not add up to the model's blocks.
    """

    parts_name = "patches"

    def __init__(
        self, module: nn.Module, adapter: Adapter, mesh: Mesh, layers: tuple[int, ...] | None, num_patches: int = 1
    ) -> None:
        super().__init__(module, chain_only(adapter), mesh, ())
        self.pipe, self.num_patches = mesh.axis("pipe"), num_patches
        self.blocks = blocks_of(module, adapter)
        sizes = stage_sizes(adapter.model, layers, len(self.blocks), self.pipe.size)
        self.starts = offsets(sizes)
        self.own = range(self.starts[self.pipe.index], self.starts[self.pipe.index] + sizes[self.pipe.index])
        self.last_layout: PartLayout | None = None
        self._layouts: dict[Any, PartLayout] = {}
        self._contents = WeakTensorKeyDictionary()
        self._received: list[Tensor] | None = None
        self._entering: dict[int, tuple[Tensor, ...]] = {}
        self._reached = 0
        # While a layout is learned, says which tokens are marked, where tokens are joined.
        self._marks: Callable[[int], Tensor] | None = None
        self._picture: range | None = None

    def describe(self, tokens: Mapping[str, int]) -> str:
        """Says what is cut."""
        return f"{super().describe(tokens)} in patches, and the blocks,"

    @property
    def is_last(self) -> bool:
        """Says whether this is the last stage."""
        return self.pipe.index == self.pipe.size - 1

    def attach(self, hooks: HookSet) -> None:
        """Puts the hooks on the blocks, and those that cut and attend."""
        # Innermost: a block that is left out still has its inputs cut, so its output has the right shape.
        for number, block in enumerate(self.blocks):
            signature = signature_of(block.module)
            hooks.add(block.module, AroundHook(self._around(number, block.names), signature), "block")
        super().attach(hooks)

    def forget(self) -> None:
        """Drops what belongs to one generation."""
        self._layouts.clear()
        self._contents.clear()
        self._entering.clear()

    def layout(self, named: Mapping[str, Any]) -> PartLayout:
        """Returns the layout of a call with such arguments; learned once per set of shapes and masks.

        Raises:
            UnsupportedError: the picture cannot be cut into patches.
        """
        key = tuple((name, self._shape_of(value)) for name, value in named.items() if name != self.adapter.timestep)
        if key not in self._layouts:
            self._layouts[key] = self._learn(named)
        return self._layouts[key]

    def _shape_of(self, value: Any) -> Any:
        """Returns the hashable part of an argument that decides the layout of a call."""
        if isinstance(value, Tensor):
            return tuple(value.shape), value.dtype, self._content_of(value)
        if isinstance(value, Mapping):
            return tuple((key, self._shape_of(item)) for key, item in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(map(self._shape_of, value))
        return value if isinstance(value, (bool, int, float, str, type(None))) else type(value)

    def _content_of(self, value: Tensor) -> bytes | None:
        """Returns the values of a mask or of lengths, by which a model may drop padding; read once per tensor."""
        if value.is_floating_point() or value.ndim > 2:
            return None
        if value not in self._contents:
            self._contents[value] = value.cpu().numpy().tobytes()
        content: bytes = self._contents[value]
        return content

    def _learn(self, named: Mapping[str, Any]) -> PartLayout:
        self._picture = None
        self._picture = self._find_picture(named)
        inputs: dict[int | None, list[tuple[Tensor, ...]]] = {}
        marks: list[Tensor] = []
        for part in (None, *range(self.num_patches)):
            output, marked = self._forward_marked(named, part, self._is_own)
            inputs[part] = [
                tuple(torch.empty_like(tensor, device="meta") for tensor in self._entering[start])
                for start in self.starts
            ]
            marks += [] if part is None else [marked]
        if self.num_patches == 1:
            marks = [torch.ones_like(marks[0])]  # all positions, including those that come from no token
        whose = torch.stack(marks)
        if not bool((whose.sum(0) == 1).all()) or not bool((whose == whose[:, :1]).all()):
            raise UnsupportedError(
                f"{self.adapter.model}: its output is not its last tokens in another order, the same in all samples, "
                "so its patches cannot be located in it; use Ulysses or DisplacedPatch"
            )
        owners = whose.int().argmax(0)
        positions = tuple(mine[0].flatten().nonzero().flatten() for mine in whose)
        return PartLayout(map_sample(output, lambda sample: owners.to(sample)), positions, inputs, self._picture)

    def _find_picture(self, named: Mapping[str, Any]) -> range | None:
        """Returns which tokens of a joined sequence become the output, found from their numbers bit by bit."""
        if self.num_patches == 1 or not any(JOINT in streams for streams in self.adapter.attention.values()):
            return None
        numbers: Any = 0
        for bit in itertools.count():
            _, marked = self._forward_marked(named, None, lambda count, bit=bit: torch.arange(count) >> bit & 1 == 1)
            numbers += marked.long() << bit
            if sum(self.sizes[JOINT]) >> (bit + 1) == 0:
                break
        if not bool((numbers == numbers[:1]).all()):
            raise UnsupportedError(
                f"{self.adapter.model}: the texts of a batch differ in length, so its pictures lie in different places "
                "of their sequences and have no common patches; sample one prompt at a time, or use Ulysses"
            )
        picture = range(int(numbers.min()), int(numbers.max()) + 1)
        if len(picture) < self.num_patches:
            raise UnsupportedError(
                f"{self.adapter.model}: {len(picture)} image tokens cannot be cut over {self.num_patches} "
                f"{self.parts_name}; use at most {len(picture)} {self.parts_name}, or a larger picture"
            )
        return picture

    def _forward_marked(
        self, named: Mapping[str, Any], part: int | None, marks: Callable[[int], Tensor]
    ) -> tuple[Any, Tensor]:
        """Runs the model without its blocks; returns what it returns, and which positions come from marked tokens.

        Marked tokens leave the blocks as "not a number", which layers that work token by token preserve.
        """
        self._marks = marks
        try:
            # In a context of its own no ledger is active: nothing is computed here that a step would count.
            output = contextvars.Context().run(self._forward, named, part)
        finally:
            self._marks = None
        return output, sample_of(output).isnan()

    def _is_own(self, count: int) -> Tensor:
        """Says which tokens belong to the current part."""
        sizes = self.cut_sizes(count)
        parts = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        return parts == self.axis.index

    def cut_sizes(self, total: int) -> tuple[int, ...]:
        """Returns the tokens of each part of the current call."""
        return self.part_sizes(total, self.axis.size)

    def part_sizes(self, total: int, parts: int) -> tuple[int, ...]:
        """Returns the tokens of each of `parts` parts, as even as possible.

        In a joint sequence of text and picture, the picture is shared out evenly, so that calls with other texts have
        the same patches; the text around it goes to the first and the last part.
        """
        if self._picture is None:
            return split_sizes(total, parts)
        first, *rest = split_sizes(len(self._picture), parts)
        *rest, last = (first + self._picture.start, *rest)
        return (*rest, last + total - self._picture.stop)

    def work(self, named: Mapping[str, Any], layout: PartLayout, part: int | None, received: Tensor | None) -> Tensor:
        """Runs this rank's blocks on one part.

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
        self.last_layout, self._picture = layout, layout.picture
        output = self._forward(named, part)
        if self.is_last:
            return layout.read(sample_of(output), part)
        leaving = self._entering[self.starts[index + 1]]
        for after, before in zip(leaving, layout.inputs[part][index + 1], strict=True):
            if after.shape != before.shape or after.dtype != before.dtype:
                raise UnsupportedError(
                    f"{self.adapter.model}: blocks turn {list(before.shape)} of {before.dtype} into "
                    f"{list(after.shape)} of {after.dtype}; only blocks that keep shape and type can be staged"
                )
        return torch.cat([tensor.flatten() for tensor in leaving])

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
            if self._marks is not None or number not in self.own:
                given = tuple(named[name] for name in names)
                return given if len(names) > 1 else given[0]
            if number == self.own.start and self._received is not None:
                named.update(zip(names, self._received, strict=True))
            output = forward(**named)
            check_returned(self.adapter.model, self.blocks[number].name, output, names)
            return output

        return run

    def _gather(self, output: Tensor, name: str, cut: Split) -> Tensor:
        """Puts this part's rows among zeros for the others; while a layout is learned, marks instead."""
        sizes = self.sizes[cut.stream]
        if len(sizes) == 1 and self._marks is None:
            return output
        moved = self._only_own(output, cut).movedim(cut.dim, 0)
        whole = moved.new_zeros((sum(sizes), *moved.shape[1:]))
        if self._marks is not None:
            whole[self._marks(len(whole)).to(whole.device)] = torch.nan
        else:
            start = offsets(sizes)[self.axis.index]
            whole[start : start + sizes[self.axis.index]] = moved
        return whole.movedim(0, cut.dim)

    def _mask_of_all_queries(
        self, mask: Tensor, sizes: Mapping[str, tuple[int, ...]], streams: tuple[str, ...]
    ) -> Tensor | None:
        """Leaves such a mask to be refused: parts are computed at different times."""
        return None

    def _whole_masks(self, rows: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Returns the mask of this part: nothing is gathered."""
        return (rows[:, None, None],)

    def _known_masks(self, shares: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Picks the mask of this part out of those of all parts."""
        return (shares[self.axis.index],)

    def call_notes(self) -> Any:
        """Returns the layout of this call."""
        return self.last_layout

    def recall(self, notes: Any) -> None:
        """Prepares `predict` for a call of that layout."""
        self.last_layout = self.last_layout if notes is None else notes

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes the stage at `index` sends in one call: to the next, or the output to all others."""
        assert self.last_layout is not None
        if index == self.pipe.size - 1:
            return self.last_layout.owners.nbytes * (self.pipe.size - 1)
        return sum(tensor.nbytes for tensor in self.last_layout.inputs[None][index + 1])
