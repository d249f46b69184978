"""Posts single messages that lie in the host's memory: through memory that ranks share, or through gloo's sockets."""

from __future__ import annotations

import zlib
from typing import Any

import torch.distributed as dist
from torch import Tensor

from partsong.parallel.ranks.mesh import Axis

__all__ = ["post", "tag_of"]

_TAGS = 1 << 16


def tag_of(name: str, count: int) -> int:
    """Returns a message's tag, of which its name is a part.

    Ranks with different requests wait until one times out, and never mix up data.
    """
    return (zlib.crc32(name.encode()) % (_TAGS >> 2)) * _TAGS + count % _TAGS


def post(axis: Axis, tensor: Tensor, peer: int, tag: int, *, is_sent: bool) -> Any:
    """Posts one message and returns its handle.

    Args:
        axis: the ranks taking part.
        tensor: contiguous, in the host's memory.
        peer: place on the axis of the rank that it comes from or goes to.
        tag: what both ranks call it.
        is_sent: whether it is sent and not received.
    """
    if axis.shared is not None and axis.shared.takes(tensor.nbytes):
        way, key = axis.shared.peer(axis.ranks[peer]), (zlib.crc32(axis.name.encode()), tag)
        return way.send(tensor, key) if is_sent else way.receive(tensor, key)
    # torch's own functions check every message once more, which takes as long as it does to post one.
    call = axis.group.send if is_sent else axis.group.recv
    return call([tensor], dist.get_group_rank(axis.group, axis.ranks[peer]), tag)
