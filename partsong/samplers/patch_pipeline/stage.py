"""The stages of a pipeline of patches: each keeps the keys and values of the whole picture for its own blocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.attention_call import AttentionCall, attend_locally
from partsong.parallel.cuts.staged_blocks import PartLayout, StagedBlocks
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.ranks.shards import offsets, split_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from partsong.samplers.patch_pipeline.strategy import PatchPipeline

__all__ = ["StagedPatches"]


@dataclass(slots=True)
class _KeyValues:
    """Keys and values of the whole picture for one attention, patch after patch, and their mask `[B, 1, 1, S]`."""

    k: Tensor
    v: Tensor
    mask: Tensor | None


class StagedPatches(StagedBlocks):
    """Blocks of one rank, and for each of their attentions the newest keys and values of every patch.

    Args:
        module: the transformer.
        adapter: its row, resolved.
        mesh: the ranks; those of axis ``pipe`` are the stages in order.
        clock: its step and branch are those of the patch at work.
        strategy: the knobs.

    Raises:
        UnsupportedError: see `StagedBlocks`.
        ArgumentError: see `StagedBlocks`.
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
        """This rank's blocks on one part; see `StagedBlocks.work`."""
        result = super().work(named, layout, part, received)
        if part is None and self.clock.step == self.warmup_steps - 1:
            self._filled[self.clock.branch] = layout
        return result

    def check_filled(self, layout: PartLayout, step: int, branch: int) -> None:
        """Refuses, on all ranks alike, a call after the warm-up that the warm-up's last step did not make."""
        if self.num_patches > 1 and self._filled.get(branch) is not layout:
            raise UnsupportedError(
                f"PatchPipeline: call {branch + 1} of step {step + 1} has no counterpart of the same shape in step "
                f"{self.warmup_steps}, the last of the warm-up, so there are no keys to read; "
                f"use warmup_steps={step + 1} or more"
            )

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
