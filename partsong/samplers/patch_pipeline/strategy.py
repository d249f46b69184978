"""Pipeline of layers and patches: patches of the picture travel through stages of blocks (arXiv 2405.14430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from partsong.errors import ArgumentError
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.block_lists import chain_reason
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Kind, Strategy
from partsong.samplers.patch_pipeline.stage import StagedPatches

__all__ = ["PatchPipeline"]

#: Numbers up to here are whole in every floating-point type: the model's output once holds the number of its patch.
MAX_PATCHES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchPipeline(Strategy):
    """Gives each rank a run of the model's blocks, through which the patches of the picture travel one after another.

    While one stage works on a patch, the stage before it works on the next: only what enters a block passes between
    neighbours, once per step, which is far less than any exchange inside attention moves. A patch attends to the keys
    and values of the whole picture, which every stage keeps for its own blocks: fresh for the patches that came
    before it in this step, one step old for the others. Approximate; with ``warmup_steps`` at or above the number of
    steps it is exact (and no faster than one rank). Sample with `partsong.samplers.generate`.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        num_patches: patches in flight; None is one per rank. Fewer leave ranks idle; from two per rank on, the
            messages travel while the next patch is computed.
        warmup_steps: first steps in which the whole picture goes through the stages at once; at least 1, since there
            is nothing old to read in the first step.
        layers: blocks of each stage; None deals them out evenly by number.

    Source: PipeFusion, arXiv 2405.14430.

    Example:
        >>> PatchPipeline(num_patches=8).kind
        'approximate'
    """

    axes: ClassVar[tuple[str, ...]] = ("pipe",)
    kind: ClassVar[Kind] = "approximate"
    loop: ClassVar[str | None] = "patch_pipeline"

    degree: int | None = None
    num_patches: int | None = None
    warmup_steps: int = 1
    layers: tuple[int, ...] | None = None

    def validate(self) -> None:
        """Refuses counts below one, and a number of stages other than the degree."""
        super(PatchPipeline, self).validate()
        counts = {"num_patches": self.num_patches, "warmup_steps": self.warmup_steps}
        for name, value in counts.items():
            if value is None and name == "num_patches":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                why = "; the first step has nothing old to read" if name == "warmup_steps" else ""
                raise ArgumentError(f"PatchPipeline: {name}={value!r}; use 1 or more{why}")
        if self.num_patches is not None and self.num_patches > MAX_PATCHES:
            raise ArgumentError(f"PatchPipeline: num_patches={self.num_patches}; use at most {MAX_PATCHES}")
        if self.layers is None:
            return
        if not isinstance(self.layers, tuple) or any(not isinstance(n, int) or n < 1 for n in self.layers):
            raise ArgumentError(
                f"PatchPipeline: layers={self.layers!r}; give the blocks of each stage, such as (14, 14)"
            )
        if self.degree is not None and len(self.layers) != self.degree:
            raise ArgumentError(
                f"PatchPipeline: layers={self.layers} names {len(self.layers)} stages, not {self.degree}"
            )

    def stale(self) -> str:
        """What is old, and how it is read."""
        return (
            f"after {self.warmup_steps} step{'s' if self.warmup_steps > 1 else ''}, keys and values of patches that "
            "come later in a step are one step old"
        )

    def refuses(self, adapter: Adapter) -> str | None:
        """Models whose blocks hand on more than tokens, or whose tokens are more than keys to each other."""
        lists = {path.partition(".")[0] for path in adapter.attention}
        early = [path for path in adapter.gather or () if path.partition(".")[0] in lists]
        reasons = {
            "its linear attention and convolutions look across patches": bool(adapter.linear_attention),
            "it attends sample by sample, to the tokens that each has": adapter.attends_per_sample,
            "it puts tokens together before its last layer": bool(early) or len(adapter.gather or ("",)) != 1,
        }
        found = chain_reason(adapter) or next((reason for reason, holds in reasons.items() if holds), None)
        return None if found is None else f"{found}; use another strategy that splits tokens, such as Ulysses"

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> StagedPatches | None:
        """The stage of this rank; None where one rank has all blocks."""
        return StagedPatches(module, adapter, mesh, clock, self) if mesh.axis("pipe").size > 1 else None
