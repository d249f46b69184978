"""Takes objects from rank to rank: gives every rank one of the first, or sends one from a rank to another.

Ranks of a server wait for the next object for hours, so these messages go through sockets.
"""

from __future__ import annotations

import datetime
import itertools
import pickle
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partsong.parallel.ranks.collectives import Pending, broadcast, exchange
from partsong.parallel.ranks.health import operation
from partsong.parallel.ranks.mesh import Axis

__all__ = ["ObjectInbox", "apart", "receive_object", "send_object", "share_object"]

#: Bytes that the first message holds; a longer object needs a second one.
_SHORT = 2048
#: How long an inbox waits: for ever, as far as the library for messages can count. Health, not time, ends its wait.
_FOR_EVER = datetime.timedelta(days=3650)


def share_object(axis: Axis, value: Any, *, name: str) -> Any:
    """Returns the first rank's object on every rank.

    Args:
        axis: the ranks, whose messages lie in the host's memory.
        value: what can be pickled; only the first rank's counts.
        name: what errors call it.
    """
    if axis.size == 1:
        return value
    is_first, axis = axis.index == 0, axis.by_sockets()
    body = pickle.dumps(value) if is_first else b""
    first = broadcast(axis, _first(body), name=name)
    length = _length(first)
    rest = _empty_rest(length)
    if len(rest):
        rest = broadcast(axis, _bytes(body[_SHORT:]) if is_first else rest, name=name)
    return value if is_first else _object(first, rest)


def send_object(axis: Axis, peer: int, value: Any, *, name: str) -> None:
    """Sends an object to one rank of the axis, which calls `receive_object` or has an `ObjectInbox` for it.

    Args:
        axis: the ranks, whose messages lie in the host's memory.
        peer: index of the receiver.
        value: what can be pickled.
        name: what errors call it, the same on both ranks.

    Raises:
        DistributedError: the receiver is gone.
    """
    body, axis = pickle.dumps(value), axis.by_sockets()
    exchange(axis, {peer: _first(body)}, {}, name=name).wait()
    if len(body) > _SHORT:
        exchange(axis, {peer: _bytes(body[_SHORT:])}, {}, name=name).wait()


def receive_object(axis: Axis, peer: int, *, name: str) -> Any:
    """Waits for an object that one rank of the axis sends with `send_object`; arguments and errors are those there."""
    first, axis = _first(b""), axis.by_sockets()
    exchange(axis, {}, {peer: first}, name=name).wait()
    return _object(first, _rest(axis, peer, first, name))


def apart(axis: Axis) -> Axis:
    """Returns an axis of the same ranks that counts its messages by itself.

    A rank that sends on one and receives on another may do so in any order.
    """
    return replace(axis, calls=itertools.count(), doubts=[])


class ObjectInbox:
    """Receives objects of another rank in a thread, so that this rank computes meanwhile; `is_there` tells of one.

    `take` waits for as long as it takes, unless the other rank dies or leaves the run.

    Args:
        axis: the ranks, whose messages lie in the host's memory; nothing else is received on it.
        peer: index of the rank that sends.
        name: what errors call the objects, the same on both ranks.
    """

    def __init__(self, axis: Axis, peer: int, *, name: str) -> None:
        self._axis, self._peer, self._name = axis.by_sockets(), peer, name
        self._asked: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._arrived = threading.Event()
        self._error: RuntimeError | None = None
        self._first = _first(b"")
        threading.Thread(target=self._wait, name=f"inbox of {name}", daemon=True).start()

    @property
    def is_there(self) -> bool:
        """Says whether `take` would return at once."""
        return self._arrived.is_set()

    def ask(self) -> None:
        """Begins to wait for the next object."""
        self._arrived.clear()
        self._asked.put(exchange(self._axis, {}, {self._peer: self._first}, name=self._name))

    def take(self) -> Any:
        """Returns the object that was asked for.

        Raises:
            DistributedError: the rank that should send it is gone.
        """
        with operation(self._name, [self._axis.ranks[self._peer]]):
            self._arrived.wait()
            if self._error is not None:
                raise self._error
        return _object(self._first, _rest(self._axis, self._peer, self._first, self._name))

    def close(self) -> None:
        """Ends the thread, which waits no more."""
        self._asked.put(None)

    def _wait(self) -> None:
        # It notes nothing for other ranks: as far as they are concerned this process computes, until `take` waits.
        while (pending := self._asked.get()) is not None:
            try:
                _wait_for(pending.works)
            except RuntimeError as error:
                self._error = error
            self._arrived.set()


def _wait_for(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait(_FOR_EVER)


def _rest(axis: Axis, peer: int, first: Tensor, name: str) -> Tensor:
    """Receives what the first message of an object had no room for."""
    rest = _empty_rest(_length(first))
    if len(rest):
        exchange(axis, {}, {peer: rest}, name=name).wait()
    return rest


def _first(body: bytes) -> Tensor:
    """Returns the first message of an object: how long it is, and its beginning."""
    first = torch.zeros(8 + _SHORT, dtype=torch.uint8)
    first[:8] = _bytes(len(body).to_bytes(8, "little"))
    first[8 : 8 + min(len(body), _SHORT)] = _bytes(body[:_SHORT])
    return first


def _length(first: Tensor) -> int:
    return int.from_bytes(first[:8].numpy().tobytes(), "little")


def _empty_rest(length: int) -> Tensor:
    return torch.zeros(max(0, length - _SHORT), dtype=torch.uint8)


def _object(first: Tensor, rest: Tensor) -> Any:
    body = torch.cat([first[8 : 8 + min(_length(first), _SHORT)], rest])
    return pickle.loads(body.numpy().tobytes())  # pickled by another of our own ranks


def _bytes(data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
