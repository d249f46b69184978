"""Gives each rank a run of a language model's layers (pipeline parallelism, arXiv 1811.06965)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from partsong.knobs import Count
from partsong.parallel.cuts.stage_sizes import Layers, check_layers, stage_sizes
from partsong.parallel.protocols import TextShards
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.text_only import TextOnly

__all__ = ["LayerPipeline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPipeline(TextOnly):
    """Gives each rank a run of a language model's layers, with their weights and their keys. Exact.

    A call goes through the ranks one after the other: each runs its layers and sends the states of the tokens to the
    next one, and the last one sends its result to all. That is two messages a token beside those of the vocabulary,
    which is cut over all ranks, where `TensorParallel` sends two for every layer. In return one rank works at a time:
    it makes a model fit, and does not make it faster.

    Use it when a language model does not fit one device and links are slow, or its heads do not divide.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        layers: layers of each rank; None distributes them evenly.

    Source: GPipe, arXiv 1811.06965.

    Example:
        >>> LayerPipeline(layers=(14, 16)).kind
        'exact'
    """

    axes: ClassVar[tuple[str, ...]] = ("pipe",)
    cuts_weights: ClassVar[bool] = True
    instead: ClassVar[str] = "it gives out the layers of language models; use PatchPipeline or ShardedWeights"

    degree: Count | None = None
    layers: Layers | None = None

    def validate(self) -> None:
        """Refuses a number of stages other than the degree."""
        super(LayerPipeline, self).validate()
        check_layers("LayerPipeline", self.layers, self.degree)

    def text_shards(self, model: Any, mesh: Mesh) -> TextShards | None:
        """Returns the run of layers of this rank.

        Raises:
            ArgumentError: fewer layers than ranks, or numbers of layers that are not those of the model.
            UnsupportedError: layers that hand on more than states.
        """
        from partsong.parallel.text.stages import TextStages, find_layers

        axis, name = mesh.axis("pipe"), type(model).__name__
        return TextStages(model, axis, stage_sizes(name, self.layers, len(find_layers(model)), axis.size))
