"""Holds one rank's share of the weights of every block, and counts what gathering them moves."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.protocols import Cut, Shards
from partsong.parallel.ranks.mesh import AXES, Axis
from partsong.parallel.ranks.pieces import WeightPiece
from partsong.parallel.sharded_weights.dry_gathers import DryGathers
from partsong.parallel.sharded_weights.torch_shards import TorchShards

__all__ = ["WeightShares", "find_units"]


def find_units(module: nn.Module, adapter: Adapter, lent: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Lists the blocks whose weights are gathered one after the other, inner ones before those that hold them.

    Blocks of `lent` are left out: they are called while their model is not, so their weights stay whole.

    Raises:
        UnsupportedError: the model has no list of blocks.
    """
    # A transformer's blocks may call their own lists depending on the tokens, such as experts; a UNet's never do.
    called = [unit for unit in _units(module, deep=bool(adapter.rows)) if any(True for _ in unit.parameters())]
    units = [unit for unit in called if unit not in lent]
    if not units:
        raise UnsupportedError(
            f"ShardedWeights on {adapter.model}: found no list of blocks whose weights could be gathered one after the "
            "other; drop ShardedWeights"
        )
    return units


def _units(module: nn.Module, *, deep: bool) -> list[nn.Module]:
    inner: list[nn.Module] = []
    for child in module.children():
        blocks = [*child] if isinstance(child, nn.ModuleList) and all(map(_is_block, child)) else None
        for block in blocks or [child]:
            inner += _units(block, deep=deep) if blocks is None or deep else []
            inner += [block] if blocks else []
    return inner


def _is_block(module: nn.Module) -> bool:
    """Says whether a module is called and has two layers with weights: others are lists, or parts of a layer."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    return sum(any(True for _ in layer.parameters(recurse=False)) for layer in module.modules()) > 1


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
        self.module, self.axis = module, axis
        self.shards = TorchShards(module, units, axis, device)
        self.dry = DryGathers(self.shards.units, self.shards.sizes, axis)

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
