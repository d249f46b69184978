"""Gives each rank some experts of every layer of a language model (GShard, arXiv 2006.16668)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from partsong.errors import ArgumentError
from partsong.knobs import Count
from partsong.parallel.protocols import TextShards
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.text_only import TextOnly

__all__ = ["TokenExperts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenExperts(TextOnly):
    """Gives each rank some experts of every layer of a language model, to which the tokens that chose them go. Exact.

    Attention and router are whole on every rank and compute all tokens, so every rank knows who chose whom, and only
    results move: a rank sends those of the tokens that chose one of its experts. The more often tokens find their
    experts on one rank, the fewer results there are; ``placement`` arranges for that. The vocabulary is cut as well.

    Use it when a mixture-of-experts language model does not fit one device: its experts are nearly all of its weights.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        placement: a file of `measure_placement` that says which experts stay together; None takes them in order.

    Source: GShard, arXiv 2006.16668; the placement is the idea of ExFlow, arXiv 2401.08383.

    Example:
        >>> TokenExperts().kind
        'exact'
    """

    axes: ClassVar[tuple[str, ...]] = ("expert",)
    cuts_weights: ClassVar[bool] = True
    instead: ClassVar[str] = "it gives out the experts of language models; use ExpertParallel or ShardedWeights"

    degree: Count | None = None
    placement: str | None = None

    def text_shards(self, model: Any, mesh: Mesh) -> TextShards | None:
        """Returns the experts of this rank.

        Raises:
            ArgumentError: a layer has fewer experts than there are ranks, or the placement is of another model.
            UnsupportedError: the model has no experts as transformers calls them.
        """
        from partsong.parallel.token_experts.layers import expert_layers
        from partsong.parallel.token_experts.placement import read_placement
        from partsong.parallel.token_experts.shares import PlacedTokenExperts

        axis, layers = mesh.axis("expert"), expert_layers(model)
        fewest = min(layer.num_experts for layer in layers.values())
        if fewest < axis.size:
            raise ArgumentError(
                f"TokenExperts on {type(model).__name__}: {fewest} experts cannot be shared by {axis.size} ranks; use "
                f"at most {fewest}"
            )
        return PlacedTokenExperts(model, axis, layers, read_placement(self.placement, layers))
