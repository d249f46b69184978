"""Keeps memory that the layers of a generation share, with the messages that were prepared for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from partsong.parallel.hooks.clock import StepClock

__all__ = ["MOST_ROOMS", "Rooms"]

#: Most shapes for which memory is kept at a time.
MOST_ROOMS = 8

Room = TypeVar("Room")


class Rooms(Generic[Room]):
    """Keeps a room for each shape of tensors that arrive in a generation, and drops all of them at its end."""

    def __init__(self, clock: StepClock) -> None:
        self._rooms: dict[tuple[Any, ...], Room] = {}
        clock.on_end(self._rooms.clear)

    def of(self, like: Tensor, sizes: Sequence[int], make: Callable[[], Room]) -> Room:
        """Returns the room for tensors like this one and these sizes of shards; makes it the first time."""
        # What was allocated in inference mode cannot be written to outside.
        key = like.shape, tuple(sizes), like.dtype, like.device, torch.is_inference_mode_enabled()
        if (room := self._rooms.get(key)) is None:
            if len(self._rooms) >= MOST_ROOMS:
                self._rooms.clear()
            room = self._rooms[key] = make()
        return room
