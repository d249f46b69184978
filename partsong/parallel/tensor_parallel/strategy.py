"""Splits the width of a model's layers over ranks (Megatron-LM, arXiv 1909.08053)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from partsong.knobs import Count
from partsong.parallel.adapters import Adapter
from partsong.parallel.attention_call import TOKEN_AXES
from partsong.parallel.protocols import Shards, TextShards
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Strategy
from partsong.parallel.tensor_parallel.parts import UNKNOWN, find_parts
from partsong.parallel.tensor_parallel.quantised_weights import check_layers
from partsong.parallel.tensor_parallel.weight_columns import WeightColumns

__all__ = ["TensorParallel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel(Strategy):
    """Splits attention heads and feed-forward columns, and their weights with them, over ranks. Exact.

    Every rank has all tokens and computes its heads and its columns. What these add to the tokens is summed over the
    ranks after each attention and each feed-forward layer, so a block takes two sums of all tokens: far more bytes than
    other strategies move. In return a rank holds only its share of the weights of these layers. Heads and columns that
    do not divide are shared unevenly. Embeddings, modulation and unknown layers stay whole on every rank.

    The weights are cut in place, without a copy, so call `parallelize` before you move the pipeline to its
    device: then only this rank's share goes there. `Plan.undo` puts the whole weights back.

    Use it when the weights do not fit one device and the links are fast.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.

    Source: Megatron-LM, arXiv 1909.08053.
    """

    axes: ClassVar[tuple[str, ...]] = ("tensor",)
    cuts_weights: ClassVar[bool] = True

    degree: Count | None = None

    def composes(self, other: Strategy) -> bool:
        """Says that it runs beside strategies that split guidance, batches or the tokens of whole layers."""
        return not other.has_loop and set(other.axes) <= {"cfg", "data", *TOKEN_AXES} and bool(other.axes)

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models whose layers have other names than those it knows."""
        if adapter.model in UNKNOWN:
            return "the columns of its layers are not known; use CfgParallel"
        return None

    def shards(self, module: nn.Module, adapter: Adapter, mesh: Mesh, lent: Collection[nn.Module]) -> Shards | None:
        """Returns the shares of the layers' weights."""
        axis = mesh.axis("tensor")
        has_tokens = mesh.axis(*TOKEN_AXES).size > 1
        if axis.size == 1:
            return None
        check_layers(module)
        return WeightColumns(adapter, tuple(find_parts(module)), axis, has_tokens)

    def text_shards(self, model: Any, mesh: Mesh) -> TextShards | None:
        """Returns the shares of a language model's layers and of its vocabulary."""
        from partsong.parallel.text.columns import TextColumns

        return TextColumns(model, mesh.axis("tensor"))
