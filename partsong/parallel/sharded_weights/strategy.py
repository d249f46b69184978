"""Shares out the weights of whole blocks over ranks (ZeRO's third stage for inference, arXiv 1910.02054)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from partsong.parallel.adapters import Adapter
from partsong.parallel.attention_call import TOKEN_AXES
from partsong.parallel.cuts.block_lists import READ_FROM_OUTSIDE
from partsong.parallel.cuts.block_units import find_units
from partsong.parallel.protocols import Shards, TextShards
from partsong.parallel.ranks.mesh import AXES, Mesh
from partsong.parallel.strategy import Strategy

__all__ = ["ShardedWeights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedWeights(Strategy):
    """Keeps a share of every block's weights on each rank, and gathers a block right before it runs. Exact.

    A rank holds its share of all blocks, and all of the current block and the next one, which is gathered while the
    current one computes. Layers outside the blocks, such as embeddings, stay
    whole, and so do blocks that a ControlNet borrows. The bytes of a step are those of
    the weights, whatever the size of the picture: it suits large pictures and models that do not fit.

    It has no axis of its own and works beside strategies that split tokens, guidance or batches, over all their ranks.
    Ranks that no other strategy takes become ``data`` ranks, which share out the samples of a batch; with one sample
    they all compute the same.

    Call `parallelize` before you move the pipeline to its device: then blocks go there one by one, are cut, and only
    this rank's share stays. `Plan.undo` gathers the whole weights again, on every rank.

    Use it when the weights do not fit one device and each step has many tokens, such as a video's.

    Source: ZeRO, arXiv 1910.02054; the sharding is torch's ``fully_shard`` (PyTorch FSDP, arXiv 2304.11277).

    Example:
        >>> ShardedWeights().kind
        'exact'
    """

    uses_all_ranks: ClassVar[bool] = True
    cuts_weights: ClassVar[bool] = True

    def composes(self, other: Strategy) -> bool:
        """Says that it runs beside strategies that split guidance, batches or the tokens of whole layers."""
        return not other.has_loop and set(other.axes) <= {"cfg", "data", *TOKEN_AXES} and bool(other.axes)

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models that read a block's weights outside of the block, or choose among blocks sample by sample."""
        if adapter.model in READ_FROM_OUTSIDE:
            return "it reads a layer of its first block outside of that block; use TensorParallel"
        if adapter.mixes:
            return "each sample takes experts of its own, so ranks call other blocks; use ExpertParallel"
        return None

    def shards(self, module: nn.Module, adapter: Adapter, mesh: Mesh, lent: Collection[nn.Module]) -> Shards | None:
        """Returns the shares of the blocks' weights.

        Raises:
            UnsupportedError: the model has no list of blocks, or weights of a kind that cannot be shared out.
        """
        # torch's sharding takes more than half a second to import.
        from partsong.parallel.sharded_weights.weight_shares import WeightShares

        axis = mesh.lane(*AXES)  # attention must not wait for the next block's weights
        return None if axis.size == 1 else WeightShares(module, find_units(module, adapter, lent), axis, mesh.device)

    def text_shards(self, model: Any, mesh: Mesh) -> TextShards | None:
        """Returns the shares of a language model's blocks and of its vocabulary."""
        from partsong.parallel.text.blocks import TextBlocks

        return TextBlocks(model, mesh)
