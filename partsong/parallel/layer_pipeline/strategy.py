"""Gives each rank a run of a model's layers (pipeline parallelism, arXiv 1811.06965)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from partsong.knobs import Count
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.block_lists import runs_reason
from partsong.parallel.cuts.stage_sizes import Layers, check_layers, stage_sizes
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.layer_pipeline.blocks import LayerWeights, PipelinedBlocks
from partsong.parallel.protocols import Shards, TextShards
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Strategy

__all__ = ["LayerPipeline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPipeline(Strategy):
    """Gives each rank a run of a model's layers, with their weights, through which samples go one by one. Exact.

    Each rank runs its layers and sends what leaves them to the next one, and the last one sends its result to all.
    That is little to send, and in return a rank waits for those before it. A denoiser's call is taken apart: while a
    rank works on a sample, the one before it works on the next, so several pictures, or branches of guidance, keep
    several ranks busy. Where the pipeline calls the model once per branch, the first step shows the calls, and from the
    second on all calls of a step go through the ranks together (see `GuidancePair`). One sample without guidance goes
    through the ranks in turn: that makes a model fit, and does not make it faster.

    The rows of a language model's call go through the ranks in parts, in the same way, where there are at least two of
    `smallest` tokens each: prompts, and texts of masked models. One row goes through the ranks in turn, and so does a
    step of one token a row, which would read the weights once for each part. So do rows whose cache is not known to be
    cut by rows (static, quantised or offloaded ones, and states of linear attention), models that change states between
    their layers, and models with hooks on their layers; `explain` says why. A rank has the keys of its own layers. The
    vocabulary is cut over all ranks. `TensorParallel` sends two messages a token for every layer.

    Use it when a model does not fit one device and links are slow, or its heads do not divide.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        layers: layers of each rank; None distributes them evenly.
        smallest: tokens of the smallest part of a text call. It should be about as many as a device computes while it
            reads the weights once: about a hundred on GPUs, ten on CPUs.

    Source: GPipe, arXiv 1811.06965.

    Example:
        >>> LayerPipeline(layers=(14, 16)).kind
        'exact'
    """

    axes: ClassVar[tuple[str, ...]] = ("pipe",)
    cuts_weights: ClassVar[bool] = True
    cuts_blocks: ClassVar[bool] = True
    changes_parts: ClassVar[bool] = True
    expects_calls: ClassVar[bool] = True

    degree: Count | None = None
    layers: Layers | None = None
    smallest: Count = 128

    def validate(self) -> None:
        """Refuses a number of stages other than the degree."""
        super(LayerPipeline, self).validate()
        check_layers("LayerPipeline", self.layers, self.degree)

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models whose blocks are not one chain."""
        reason = runs_reason(adapter)
        return None if reason is None else f"{reason}; {adapter.instead}"

    def composes(self, other: Strategy) -> bool:
        """Says that guidance and samples may be shared out as well."""
        return bool(other.axes) and set(other.axes) <= {"cfg", "data"}

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> PipelinedBlocks | None:
        """Returns the run of blocks of this rank.

        Raises:
            ArgumentError: fewer blocks than ranks, or numbers of blocks that are not those of the model.
        """
        axis = mesh.axis("pipe")
        return PipelinedBlocks(module, adapter, axis, self.layers) if axis.size > 1 else None

    def shards(self, module: nn.Module, adapter: Adapter, mesh: Mesh, lent: Collection[nn.Module]) -> Shards | None:
        """Returns the weights of this rank: those of its blocks, and of what is outside of blocks."""
        axis = mesh.axis("pipe")
        return LayerWeights(module, adapter, axis, self.layers, lent) if axis.size > 1 else None

    def text_shards(self, model: Any, mesh: Mesh) -> TextShards | None:
        """Returns the run of layers of this rank.

        Raises:
            ArgumentError: fewer layers than ranks, or numbers of layers that are not those of the model.
            UnsupportedError: layers that hand on more than states.
        """
        from partsong.parallel.text.stages import TextStages, find_layers

        axis, name = mesh.axis("pipe"), type(model).__name__
        sizes = stage_sizes(name, self.layers, len(find_layers(model)), axis.size)
        return TextStages(model, axis, sizes, self.parts_of)

    def parts_of(self, texts: int, tokens: int) -> int:
        """Returns how many parts a call of a language model has.

        Args:
            texts: rows.
            tokens: those of all rows.

        Example:
            >>> LayerPipeline().parts_of(4, 4 * 100), LayerPipeline(smallest=1).parts_of(4, 4)
            (3, 4)
        """
        return max(1, min(texts, tokens // self.smallest))
