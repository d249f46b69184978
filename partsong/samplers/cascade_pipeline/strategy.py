"""Denoises several blocks of a causal video together, each some steps behind the block before (arXiv 2511.20426)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from partsong.knobs import Count, Whole
from partsong.parallel.adapters import Adapter
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Kind, Strategy
from partsong.samplers.cascade_pipeline.frames import CascadeFrames
from partsong.samplers.long_video.causal_block import check_causal, refuses_causal

__all__ = ["CascadePipeline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadePipeline(Strategy):
    """Starts each block of a causal video some steps after the block before, and denoises those in flight together.

    Causal models of few steps, such as Self-Forcing, CausVid and LongLive, read the keys of blocks that are clean, so
    a block has to wait until the block before has made all its steps and one more call that writes its clean keys.
    Here it starts ceil(steps / depth) steps after it. Time goes in slots. In a slot every block in flight makes one
    step, and in every attention each of them sees the present keys of all others, of earlier and later blocks alike. A
    block whose steps are over makes its clean call in the next slot: it sees clean blocks only, and the blocks in
    flight read its clean keys in that slot already.

    A block sees at least `window` blocks before it, and all that are in flight. The first `sink` frames of the video
    are rotated to lie just before the earliest block that it sees. So memory does not grow with the length.

    The ranks share the blocks in flight, and send each other the keys of every attention. The video is the same on any
    number of ranks, to the last bit on a CPU. Approximate; with ``depth=1`` it is the causal model's own rule, block
    after block. Sample with `partsong.samplers.stream` or ``generate``.

    Use it when a causal model of few steps reads clean keys of the past, and a video without end should come faster.

    Args:
        degree: ranks that share the blocks in flight; None takes all ranks that are left. There can be as many as
            blocks in a slot: with 4 steps 2, 3 and 5 at a depth of 1, 2 and 4.
        depth: the most blocks that are denoised together, from 1 to the number of steps.
        window: blocks of the past that a block sees at least.
        sink: first latent frames of the video that every block sees.

    Source: Block Cascading, arXiv 2511.20426.

    Example:
        >>> CascadePipeline(depth=4).wanted()
        {'stage': None}
    """

    axes: ClassVar[tuple[str, ...]] = ("stage",)
    kind: ClassVar[Kind] = "approximate"
    has_loop: ClassVar[bool] = True
    loops_alone: ClassVar[bool] = True

    degree: Count | None = None
    depth: Count = 2
    window: Count = 3
    sink: Annotated[int, Whole(0)] = 1

    def stale(self) -> str:
        """Says how much of the past is seen."""
        return (
            f"blocks see {self.window} blocks of the past and the first {self.sink} frames; up to {self.depth} blocks "
            "are denoised together, each at its own noise level"
        )

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models that are not causal along time."""
        return refuses_causal(adapter)

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> CascadeFrames | None:
        """Returns the model with forwards that pause in every attention.

        Raises:
            UnsupportedError: the model was not trained to see only the past.
            ArgumentError: the sink is longer than a block.
        """
        check_causal("CascadePipeline", module, adapter, self.sink)
        return CascadeFrames(module, adapter, mesh)
