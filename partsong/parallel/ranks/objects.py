"""Gives every rank an object of the first one."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from partsong.parallel.ranks.collectives import broadcast
from partsong.parallel.ranks.mesh import Axis

__all__ = ["share_object"]

#: Bytes that the first message holds; a longer object needs a second one.
_SHORT = 2048


def share_object(axis: Axis, value: Any, *, name: str) -> Any:
    """Returns the first rank's object on every rank.

    Args:
        axis: the ranks, whose messages lie in the host's memory.
        value: what can be pickled; only the first rank's counts.
        name: what errors call it.
    """
    if axis.size == 1:
        return value
    is_first = axis.index == 0
    body = pickle.dumps(value) if is_first else b""
    first = torch.zeros(8 + _SHORT, dtype=torch.uint8)
    if is_first:
        first[:8] = _bytes(len(body).to_bytes(8, "little"))
        first[8 : 8 + min(len(body), _SHORT)] = _bytes(body[:_SHORT])
    first = broadcast(axis, first, name=name)
    length = int.from_bytes(first[:8].numpy().tobytes(), "little")
    taken = first[8 : 8 + length]
    if length > _SHORT:
        rest = _bytes(body[_SHORT:]) if is_first else torch.zeros(length - _SHORT, dtype=torch.uint8)
        taken = torch.cat([taken, broadcast(axis, rest, name=name)])
    return value if is_first else pickle.loads(taken.numpy().tobytes())  # pickled by our own first rank


def _bytes(data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
