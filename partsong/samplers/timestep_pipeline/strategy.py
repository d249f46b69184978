"""Streams blocks of an endless video through the steps of a causal model, one rank per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from partsong.knobs import Count, Whole
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.stage_sizes import Layers, check_layers
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Kind, Strategy
from partsong.samplers.long_video.causal_block import check_causal, refuses_causal
from partsong.samplers.long_video.staged_frames import StagedFrames

__all__ = ["TimestepPipeline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimestepPipeline(Strategy):
    """Gives each rank one denoising step of a causal video model, through which blocks of frames stream one by one.

    A rank makes its step for a block, passes the latents on and takes the next block. It keeps keys and values of the
    blocks it has seen at its own noise level, so these are never sent: a message is one block of latents. The cache is
    bounded: the newest `window` blocks, and the first `sink` frames of the video, whose keys are kept and rotated to
    lie just before the window. Identity does not drift, and positions do not grow with the length. Ranks wait for
    messages one block later, so a slow rank holds the others back and nothing piles up. With more ranks than steps,
    `pipe_degree` ranks share the layers of each step.

    The video is the same on any number of ranks, to the last bit on a CPU. Approximate; with a window that holds the
    whole past it equals the causal model run on all frames at once. Sample with `partsong.samplers.stream` or
    ``generate``.

    Use it when a causal model of few steps streams a video without end.

    Args:
        degree: ranks along the steps; None takes all ranks that are left. With fewer ranks than steps, each makes
            several steps of a block in a row.
        pipe_degree: ranks that share the layers of each step. More than one needs a rank for every step.
        window: blocks of the past that a block sees.
        sink: first latent frames of the video that every block sees.
        layers: blocks of layers of each rank of a step; None distributes them evenly.

    Source: the timestep-forcing pipeline of Live Avatar, arXiv 2512.04677.

    Example:
        >>> TimestepPipeline(window=3).wanted()
        {'stage': None, 'pipe': 1}
    """

    axes: ClassVar[tuple[str, ...]] = ("stage", "pipe")
    kind: ClassVar[Kind] = "approximate"
    has_loop: ClassVar[bool] = True
    loops_alone: ClassVar[bool] = True

    degree: Count | None = None
    pipe_degree: Count = 1
    window: Count = 3
    sink: Annotated[int, Whole(0)] = 1
    layers: Layers | None = None

    def wanted(self) -> dict[str, int | None]:
        """Returns the ranks along the steps, and those that share each step's layers."""
        return {"stage": self.degree, "pipe": self.pipe_degree}

    def validate(self) -> None:
        """Refuses a number of stages other than `pipe_degree`."""
        super(TimestepPipeline, self).validate()
        check_layers("TimestepPipeline", self.layers, self.pipe_degree, "pipe_degree")

    def stale(self) -> str:
        """Says how much of the past is seen."""
        return f"blocks see {self.window} blocks of the past and the first {self.sink} frames, each at its noise level"

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models that are not causal along time."""
        return refuses_causal(adapter)

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> StagedFrames | None:
        """Returns the layers of this rank; all of them where each step has one rank.

        Raises:
            UnsupportedError: the model was not trained to see only the past.
            ArgumentError: the sink is longer than a block.
        """
        check_causal("TimestepPipeline", module, adapter, self.sink)
        return StagedFrames(module, adapter, mesh, self.layers)
