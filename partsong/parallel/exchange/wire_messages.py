"""Moves tensors between ranks in compressed messages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from partsong.parallel.exchange.wires import Wire, message_room
from partsong.parallel.ranks.collectives import Pending, exchange
from partsong.parallel.ranks.mesh import Axis

__all__ = ["exchange_by_wire"]


def exchange_by_wire(
    axis: Axis, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], wire: Wire | None, *, name: str
) -> Pending:
    """Posts messages to and from peers of an axis and returns at once; waiting for them decodes them.

    Args:
        axis: the ranks taking part.
        sends: contiguous block `[..., D]` for each peer index; empty ones are not sent.
        recvs: contiguous block to fill from each peer index; empty ones are not received.
        wire: how they are encoded; it carries values, not residuals. None sends them as they are.
        name: what errors call it.
    """
    if wire is None:
        return exchange(axis, sends, recvs, name=name)
    messages = {peer: wire.encode(rows) for peer, rows in sends.items() if rows.numel()}
    targets = {peer: rows for peer, rows in recvs.items() if rows.numel()}
    rooms = {peer: message_room(wire, tuple(rows.shape), rows.device) for peer, rows in targets.items()}
    pending = exchange(axis, messages, rooms, name=name)
    for peer, rows in targets.items():
        pending.then(partial(_read, wire, rooms[peer], rows))
    return pending


def _read(wire: Wire, message: Tensor, target: Tensor) -> None:
    target.copy_(wire.decode(message, tuple(target.shape)))
