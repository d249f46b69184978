"""Moves tensors between ranks by a wire."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.parallel.exchange.wires import EIGHT_BIT, Wire, WireName
from partsong.parallel.ranks.collectives import Pending, exchange
from partsong.parallel.ranks.mesh import Axis

__all__ = ["check_eight_bits", "exchange_by_wire", "wire_room"]


def check_eight_bits(strategy: str, wire: WireName) -> None:
    """Refuses wires that carry residuals, for a strategy that moves queries and outputs.

    Raises:
        ArgumentError: names the strategy and the wire, says why and what to use.
    """
    if wire not in ("none", *EIGHT_BIT):
        raise ArgumentError(
            f"{strategy}: wire={wire!r}; residuals need a base from the step before at both ends, and this strategy "
            "moves queries and outputs too, which nobody keeps; use none, fp8 or int8, or Ring or DisplacedPatch"
        )


def wire_room(wire: Wire, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Makes room for the message of a block of some shape."""
    return torch.empty(wire.size(shape), dtype=torch.uint8, device=device)


def exchange_by_wire(
    axis: Axis, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], wire: Wire | None, *, name: str
) -> Pending:
    """Posts messages to and from peers of an axis and returns at once; waiting for them reads those of a wire.

    Args:
        axis: the ranks taking part.
        sends: contiguous block `[..., D]` for each peer index; empty ones are not sent.
        recvs: contiguous block to fill from each peer index; empty ones are not received.
        wire: how they are written; it carries values, not residuals. None sends them as they are.
        name: what errors call it.
    """
    if wire is None:
        return exchange(axis, sends, recvs, name=name)
    messages = {peer: wire.encode(rows) for peer, rows in sends.items() if rows.numel()}
    targets = {peer: rows for peer, rows in recvs.items() if rows.numel()}
    rooms = {peer: wire_room(wire, tuple(rows.shape), rows.device) for peer, rows in targets.items()}
    pending = exchange(axis, messages, rooms, name=name)
    for peer, rows in targets.items():
        pending.then(partial(_read, wire, rooms[peer], rows))
    return pending


def _read(wire: Wire, message: Tensor, target: Tensor) -> None:
    target.copy_(wire.decode(message, tuple(target.shape)))
