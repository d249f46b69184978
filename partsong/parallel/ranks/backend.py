"""Chooses what carries messages between ranks: one library for all of them, agreed before they connect.

A rank that chose by itself could wait for ever for one that chose otherwise, as on a node with fewer GPUs.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from partsong.errors import ArgumentError

__all__ = ["Seat", "agreed_backend", "choose", "few_blocks", "seat_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seat:
    """Says what a rank computes on, as it tells the others.

    Attributes:
        kind: the type of its device, such as ``cuda``.
        device: what no other device in the world is called; empty for a processor.
        native: the library for devices of this type; empty where this build of torch has none.
    """

    kind: str
    device: str = ""
    native: str = ""


def seat_of(device: torch.device) -> Seat:
    """Returns the seat of this process on a device."""
    if device.type == "cpu":
        return Seat("cpu", native="gloo")
    native = dist.get_default_backend_for_device(device.type)
    is_there = getattr(dist, f"is_{native}_available", lambda: False)()
    return Seat(device.type, _name_of(device), native if is_there else "")


def _name_of(device: torch.device) -> str:
    # Ranks may each see one GPU, which all of them then call 0; only its own number tells them apart.
    if device.type in ("cuda", "xpu"):
        return str(torch.get_device_module(device).get_device_properties(device).uuid)
    return f"{socket.gethostname()}/{device}"


def choose(seats: Sequence[Seat]) -> tuple[str, str]:
    """Chooses the library for all ranks, and says why it is not the one made for their devices; empty where it is.

    Args:
        seats: of all ranks, in their order.

    Raises:
        ArgumentError: ranks compute on different types of devices.

    Example:
        >>> choose([Seat("cuda", "a", "nccl"), Seat("cuda", "a", "nccl")])
        ('gloo', 'ranks 0 and 1 share one cuda device')
    """
    for rank, seat in enumerate(seats):
        if seat.kind != seats[0].kind:
            raise ArgumentError(
                f"rank {rank} computes on {seat.kind}, rank 0 on {seats[0].kind}; give every rank a device of the "
                'same type, or open Mesh(device="cpu") on all of them'
            )
    if seats[0].kind == "cpu":
        return "gloo", ""
    for rank, seat in enumerate(seats):
        if not seat.native:
            return "gloo", f"torch has no library for messages between {seat.kind} devices on rank {rank}"
        if (first := next(r for r, other in enumerate(seats) if other.device == seat.device)) < rank:
            return "gloo", f"ranks {first} and {rank} share one {seat.kind} device"
    return seats[0].native, ""


def agreed_backend(store: Any, rank: int, world_size: int, device: torch.device) -> str:
    """Tells the other ranks what this one computes on, waits for theirs, and returns the library that all will use.

    Args:
        store: of the rendezvous.
        rank: this process.
        world_size: number of ranks.
        device: what this rank computes on.

    Raises:
        ArgumentError: ranks compute on different types of devices.
    """
    store.set(f"seat/{rank}", json.dumps(asdict(seat_of(device))))
    seats = [Seat(**json.loads(store.get(f"seat/{other}"))) for other in range(world_size)]
    backend, reason = choose(seats)
    if reason and rank == 0:
        logger.warning("messages go through the host's memory, by %s: %s", backend, reason)
    return backend


#: Most multiprocessors that bulk messages take from what is computed beside them.
BLOCKS = 8


def few_blocks(backend: str) -> Any:
    """Returns the options of a group for messages that may take their time; None where its library has none."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = BLOCKS
    return options
