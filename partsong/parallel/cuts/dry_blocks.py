"""Simulates bringing blocks' weights in before their calls, for predictions of memory and time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from partsong.parallel.hooks.model_hooks import HookSet

__all__ = ["DryBlocks", "Waits"]


class Waits(Protocol):
    """Describes a transfer that is not done yet."""

    def wait(self) -> Any:
        """Waits for it."""
        ...


class DryBlocks:
    """Brings in blocks without values: each one while the previous one computes, all into the same memory.

    Args:
        units: the blocks, in the order of their calls.
        sizes: bytes of each that are brought in.
        begin: begins to bring in a block, by its place, into a room of its size.
        unpacks: whether a block is copied out of the room before it runs; otherwise there are two rooms.
    """

    def __init__(
        self,
        units: Sequence[nn.Module],
        sizes: Sequence[int],
        begin: Callable[[int, Tensor], Waits],
        *,
        unpacks: bool = True,
    ) -> None:
        self.units, self.sizes, self.begin, self.unpacks = units, sizes, begin, unpacks
        self._under_way: dict[int, Waits] = {}
        self._whole: dict[int, Tensor] = {}
        self._room: Tensor | None = None

    def attach(self, hooks: HookSet) -> None:
        """Puts hooks on the blocks."""
        for place, unit in enumerate(self.units):
            before = unit.register_forward_pre_hook(partial(self._enter, place))
            after = unit.register_forward_hook(partial(self._leave, place))
            hooks.on_remove(before.remove)
            hooks.on_remove(after.remove)

    def post(self, place: int) -> None:
        """Begins to bring in a block."""
        if place < len(self.units) and place not in self._under_way:
            size = self.sizes[place]
            if self._room is None or self._room.nbytes < size:
                self._room = torch.empty(size, dtype=torch.uint8, device="meta")
            self._under_way[place] = self.begin(place, self._room[:size])

    def _enter(self, place: int, *call: Any) -> None:
        self.post(place)
        self._under_way.pop(place).wait()
        assert self._room is not None
        came = self._room[: self.sizes[place]]
        self._whole[place] = came.clone() if self.unpacks else torch.empty_like(came)
        self.post(place + 1)

    def _leave(self, place: int, *call: Any) -> None:
        self._whole.pop(place, None)
