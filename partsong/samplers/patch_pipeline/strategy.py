"""Sends patches of the picture through stages of blocks, in a pipeline of layers and patches (arXiv 2405.14430)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.knobs import Count, Whole
from partsong.parallel.adapters import Adapter
from partsong.parallel.attention_call import AttentionCall, attend_locally, shard_runs
from partsong.parallel.cuts.block_lists import chain_only, chain_reason
from partsong.parallel.cuts.stage_sizes import Layers, check_layers
from partsong.parallel.cuts.staged_blocks import PartLayout, StagedBlocks
from partsong.parallel.cuts.tokens import SequenceParallel
from partsong.parallel.exchange.displaced_patch import WarmUp
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.ranks.shards import offsets
from partsong.parallel.strategy import Kind, Strategy

__all__ = ["PatchPipeline", "StagedPatches"]

#: Numbers up to here are exact in every floating-point type: the model's output once holds the number of its patch.
MAX_PATCHES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchPipeline(Strategy):
    """Gives each rank a run of the model's blocks, through which the patches of the picture travel one after another.

    While one stage works on a patch, the stage before it works on the next: only the input of a run passes between
    neighbours, once per step, far less than any exchange inside attention. A patch attends to the keys
    and values of the whole picture, which every stage keeps for its own blocks: fresh for the patches that came
    before it in this step, one step old for the others. Approximate; with ``warmup_steps`` at or above the number of
    steps it is exact (and no faster than one rank). Sample with `partsong.samplers.generate`.

    Use it when links are slow, the picture is large, and it may differ a little.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        num_patches: number of patches; None means one per rank. Fewer leave ranks idle; from two per rank on, the
            messages travel while the next patch is computed.
        warmup_steps: first steps in which the whole picture goes through the stages at once; at least 1, since there
            is nothing old to read in the first step.
        layers: blocks of each stage; None distributes them evenly.

    Source: PipeFusion, arXiv 2405.14430.

    Example:
        >>> PatchPipeline(num_patches=8).kind
        'approximate'
    """

    axes: ClassVar[tuple[str, ...]] = ("pipe",)
    kind: ClassVar[Kind] = "approximate"
    has_loop: ClassVar[bool] = True

    degree: Count | None = None
    num_patches: Annotated[int, Whole(1, MAX_PATCHES)] | None = None
    warmup_steps: WarmUp = 1
    layers: Layers | None = None

    def validate(self) -> None:
        """Refuses a number of stages other than the degree."""
        super(PatchPipeline, self).validate()
        check_layers("PatchPipeline", self.layers, self.degree)

    def stale(self) -> str:
        """Says what is old, and how it is read."""
        return (
            f"after {self.warmup_steps} step{'s' if self.warmup_steps > 1 else ''}, keys and values of patches that "
            "come later in a step are one step old"
        )

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models whose blocks pass on more than tokens, or whose tokens interact outside attention."""
        chain = chain_only(adapter)
        gathers = 1 if adapter.gather is None else len(chain.gather or ())
        enters = adapter.sample in (adapter.splits or {}).get("", {})
        reasons = {
            "its linear attention and convolutions look across patches": bool(adapter.linear_attention),
            "its experts choose among all tokens of the picture, and patches are of different steps": bool(
                adapter.gathered
            ),
            "long skip connections lead from its first blocks to its last, across stages": adapter.long_skips,
            "its videos are made in sections, each from noise, for which nothing old can be read": adapter.in_sections,
            "its tokens are put together in several places": gathers != 1,
            "blocks before those of its chain attend to the whole picture, and get patches of it": enters
            and chain.attention != adapter.attention,
        }
        reason = chain_reason(adapter) or next((reason for reason, holds in reasons.items() if holds), None)
        return None if reason is None else f"{reason}; {adapter.instead}"

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> StagedPatches | None:
        """Returns the stage of this rank; None where one rank has all blocks."""
        return StagedPatches(module, adapter, mesh, clock, self) if mesh.axis("pipe").size > 1 else None


@dataclass(slots=True)
class _KeyValues:
    """Holds keys and values of the whole picture for one attention, by patch, and their mask `[B, 1, 1, S]`."""

    k: Tensor
    v: Tensor
    mask: Tensor | None


class StagedPatches(StagedBlocks):
    """Runs the blocks of one rank, and keeps for each of their attentions the newest keys and values of every patch.

    Args beside those of `StagedBlocks`:
        clock: its step and branch are those of the current patch.
        strategy: the knobs.
    """

    def __init__(
        self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock, strategy: PatchPipeline
    ) -> None:
        super().__init__(module, adapter, mesh, strategy.layers, strategy.num_patches or mesh.axis("pipe").size)
        self.clock, self.warmup_steps = clock, strategy.warmup_steps
        self._filled: dict[int, PartLayout] = {}
        self._cache: dict[tuple[int, int], _KeyValues] = {}

    def forget(self) -> None:
        """Drops what belongs to one generation."""
        super().forget()
        self._filled.clear()
        self._cache.clear()

    def work(self, named: Mapping[str, Any], layout: PartLayout, part: int | None, received: Tensor | None) -> Tensor:
        """Runs this rank's blocks on one part; see `StagedBlocks.work`."""
        result = super().work(named, layout, part, received)
        if part is None and self.clock.step == self.warmup_steps - 1:
            self._filled[self.clock.branch] = layout
        return result

    def check_filled(self, layout: PartLayout, step: int, branch: int) -> None:
        """Refuses, on all ranks alike, a call that had no counterpart in the last step of the warm-up."""
        if self.num_patches > 1 and self._filled.get(branch) is not layout:
            raise UnsupportedError(
                f"PatchPipeline: call {branch + 1} of step {step + 1} has no counterpart of the same shape in step "
                f"{self.warmup_steps}, the last of the warm-up, so there are no keys to read; "
                f"use warmup_steps={step + 1} or more"
            )

    def attend(self, call: AttentionCall) -> Tensor:
        """Computes attention of a part's queries to the keys and values of the whole picture."""
        key, own = (call.layer, self.clock.branch), None if call.masks is None else call.masks[0]
        if len(call.sizes) == 1:
            if self.clock.step == self.warmup_steps - 1 and self.num_patches > 1:
                order = self._order(call)
                k, v = call.k.index_select(2, order), call.v.index_select(2, order)
                # A mask with a row for each query is cut for each patch, or reduced to a mask for all queries.
                keys = own.any(2, keepdim=True) if own is not None and own.shape[2] > 1 else own
                self._cache[key] = _KeyValues(k, v, None if keys is None else keys.index_select(3, order))
            return attend_locally(call)
        held = self._cache[key]
        start = offsets(call.sizes)[call.index]
        rows = slice(start, start + call.sizes[call.index])
        held.k[:, :, rows], held.v[:, :, rows] = call.k, call.v
        masks = None
        if call.whole_mask is not None and call.masks is not None:
            masks = (torch.cat(call.masks, dim=-1),)  # the mask of these queries over every patch
        elif own is not None:
            assert held.mask is not None
            held.mask[..., rows] = own
            masks = (held.mask,)
        return attend_locally(replace(call, k=held.k, v=held.v, sizes=(sum(call.sizes),), index=0, masks=masks))

    def _order(self, call: AttentionCall) -> Tensor:
        """Returns the positions of each patch's tokens in one sequence of all streams."""
        (runs,) = shard_runs(call)
        cut, first = [], 0
        for stream, count in runs:
            sizes = self.part_sizes(sum(self.sizes[stream]), self.num_patches)
            # A sample may have only the first of a stream's tokens.
            starts = [min(start, count) for start in (*offsets(sizes), sum(sizes))]
            cut.append([torch.arange(first + start, first + end) for start, end in itertools.pairwise(starts)])
            first += count
        places = torch.cat(list(itertools.chain.from_iterable(zip(*cut, strict=True))))
        return places.to(call.k.device)

    def _mask_of_all_queries(
        self, mask: Tensor, sizes: Mapping[str, tuple[int, ...]], streams: tuple[str, ...]
    ) -> Tensor | None:
        """Returns a mask with a row for every query, which does not depend on the step."""
        return SequenceParallel._mask_of_all_queries(self, mask, sizes, streams)
