"""Holds one rank's share of the blocks of a language model, and of its vocabulary."""

from __future__ import annotations

from typing import Any

from torch import nn

from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.block_units import find_units
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.protocols import TextShards
from partsong.parallel.ranks.mesh import AXES, Mesh
from partsong.parallel.ranks.pieces import WeightPiece
from partsong.parallel.sharded_weights.weight_shares import WeightShares
from partsong.parallel.text.vocabulary import cut_vocabulary

__all__ = ["TextBlocks"]


class TextBlocks(TextShards):
    """Gathers a language model's blocks one after the other; what it reads of the vocabulary is summed.

    Args:
        model: of transformers.
        mesh: the ranks; all of them take part.

    Raises:
        UnsupportedError: the model has no list of blocks, or weights of a kind that cannot be shared out.
    """

    def __init__(self, model: Any, mesh: Mesh) -> None:
        self.model, self._axis = model, mesh.axis(*AXES)
        units = find_units(model.base_model, Adapter(family="text", model=type(model).__name__))
        self._shares = WeightShares(model.base_model, units, mesh.lane(*AXES), mesh.device)
        self._vocabulary: dict[tuple[nn.Module, str], WeightPiece] = {}

    def attach(self, hooks: HookSet) -> None:
        """Leaves this rank's shares in the blocks, and its tokens in the vocabulary."""
        self._shares.attach(hooks)
        self._vocabulary = cut_vocabulary(self.model, self._axis, hooks)

    def begin_forward(self) -> None:
        """Begins to gather the first block."""
        self._shares.begin_forward(1, None)

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Says which rows of a weight this rank holds; None where it holds all."""
        return self._vocabulary.get((part, name)) or self._shares.piece_of(part, name)

    def spared(self) -> int:
        """Returns the bytes of the blocks' weights that other ranks hold, where these are not taken off."""
        return self._shares.spared() if self._axis.dry else 0

    def describe(self) -> str:
        """Says in words what is shared out."""
        return f"{self._shares.describe()} and the vocabulary"
