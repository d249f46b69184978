"""Holds one rank's share of the weights of every block, and counts what gathering them moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from partsong.parallel.cuts.dry_blocks import DryBlocks
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.protocols import Cut, Shards
from partsong.parallel.ranks.collectives import Pending, all_gather
from partsong.parallel.ranks.mesh import AXES, Axis
from partsong.parallel.ranks.pieces import WeightPiece
from partsong.parallel.sharded_weights.torch_shards import TorchShards

__all__ = ["WeightShares"]


class WeightShares(Shards):
    """Shares out the weights of a model's blocks over ranks.

    Args:
        module: the model.
        units: its blocks, inner ones before those that hold them.
        axis: the ranks.
        device: where blocks are gathered.

    Raises:
        UnsupportedError: a block has weights that are not plain tensors.
    """

    axes = AXES

    def __init__(self, module: nn.Module, units: list[nn.Module], axis: Axis, device: torch.device) -> None:
        # Memory that ranks share would hold each block's weights once more, and a rank should hold few.
        self.module, self.axis = module, (axis := axis.by_sockets())
        self.shards = TorchShards(module, units, axis, device)
        self.dry = DryBlocks(self.shards.units, [size * axis.size for size in self.shards.sizes], self._gather)

    def attach(self, hooks: HookSet) -> None:
        """Leaves this rank's shares in the blocks, which are gathered whenever a block is called."""
        if self.axis.dry:
            self.dry.attach(hooks)
        else:
            hooks.on_remove(lambda: self.shards.take_off(after_error=hooks.has_failed))
            self.shards.put_on()

    def begin_forward(self, batch: int, cut: Cut | None) -> None:
        """Begins to gather the first block."""
        if self.axis.dry:
            self.dry.post(0)
        else:
            self.shards.begin_forward()

    def _gather(self, place: int, room: torch.Tensor) -> Pending:
        """Begins to gather a block on ranks that need not exist."""
        return all_gather(self.axis, room, [self.shards.sizes[place]] * self.axis.size, name="gather of weights")

    def call_notes(self) -> int:
        """Returns the bytes this rank sent in the current call for gathers of others."""
        return self.check_bytes() if self.axis.dry else self.shards.sent

    def check_bytes(self) -> int:
        """Returns the bytes a rank sends in a call of every block: they are gathered with hooks and without."""
        return sum(self.shards.sizes) * (self.axis.size - 1)

    def predict(self, notes: Any, batch: int, place: int, index: int) -> int:
        """Returns the bytes a rank sends; shares are equally large on every rank."""
        return int(notes)

    def spared(self) -> int:
        """Returns the bytes of the blocks' weights that other ranks hold."""
        whole = {weight for unit in self.shards.units for weight in unit.parameters() if weight.ndim}
        return sum(weight.nbytes for weight in whole) - sum(self.shards.sizes)

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Says which rows of a weight this rank holds; None where it holds all."""
        return self.shards.piece_of(part, name)

    def describe(self) -> str:
        """Says in words what is shared out."""
        return f"the weights of {len(self.shards.sizes)} blocks"
