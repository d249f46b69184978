"""Simulates gathering blocks on ranks that need not exist, for predictions of memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.ranks.collectives import Pending, all_gather
from partsong.parallel.ranks.mesh import Axis

__all__ = ["DryGathers"]


class DryGathers:
    """Gathers blocks without values: each one while the previous one computes, all into the same memory.

    Args:
        units: the blocks, in the order of their calls.
        sizes: bytes of a rank's share of each.
        axis: the ranks.
    """

    def __init__(self, units: Sequence[nn.Module], sizes: Sequence[int], axis: Axis) -> None:
        self.units, self.sizes, self.axis = units, sizes, axis
        self._under_way: dict[int, Pending] = {}
        self._whole: dict[int, Tensor] = {}
        self._room: Tensor | None = None

    def attach(self, hooks: HookSet) -> None:
        """Puts hooks on the blocks."""
        for place, unit in enumerate(self.units):
            before = unit.register_forward_pre_hook(partial(self._begin, place))
            after = unit.register_forward_hook(partial(self._end, place))
            hooks.on_remove(before.remove)
            hooks.on_remove(after.remove)

    def post(self, place: int) -> None:
        """Begins to gather a block."""
        if place < len(self.units) and place not in self._under_way:
            size = self.sizes[place]
            if self._room is None or self._room.nbytes < size * self.axis.size:
                self._room = torch.empty(size * self.axis.size, dtype=torch.uint8, device="meta")
            buffer = self._room[: size * self.axis.size]
            self._under_way[place] = all_gather(self.axis, buffer, [size] * self.axis.size, name="gather of weights")

    def _begin(self, place: int, *call: Any) -> None:
        self.post(place)
        self._under_way.pop(place).wait()
        assert self._room is not None
        self._whole[place] = self._room[: self.sizes[place] * self.axis.size].clone()
        self.post(place + 1)

    def _end(self, place: int, *call: Any) -> None:
        self._whole.pop(place, None)
