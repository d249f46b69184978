"""Carries messages between ranks of one machine through memory that both have mapped.

gloo moves a message through a socket and wakes a thread on either side, which takes a core from what the ranks compute.
Here the sender copies into a room of its own and the receiver copies out while it waits, so no other thread takes part.
Every rank has one file in memory with a room for each peer. A room begins with two counters and a ring of entries that
say where messages lie. The sender writes an entry and then the first counter, the receiver the second counter. That is
enough on processors that keep the order of stores, as those of x86 do.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["SharedMemory", "machine_of"]

#: Environment variable that, set to 0, lets all messages go through sockets.
VARIABLE = "PARTSONG_SHARED_MEMORY"
#: Bytes of a room for messages. Pages count only once they were written to, and an empty room is filled from its start.
ROOM = 64 << 20
#: Messages of a room that are not yet taken, at most.
ENTRIES = 512
_POSTED, _TAKEN, _CLOSED, _FIRST_ENTRY, _FIELDS = 0, 8, 16, 24, 4
_HEAD = 8 * (_FIRST_ENTRY + _FIELDS * ENTRIES)
_LINE = 64
_START = -(-_HEAD // mmap.PAGESIZE) * mmap.PAGESIZE
#: Seconds of a wait in which the processor only looks, lends itself to others that have work, and sleeps for moments.
_LOOKING, _LENDING, _MOMENT, _LONG_MOMENT = 50e-6, 5e-3, 0.2e-3, 2e-3

#: What a message is called: its axis and its tag.
Key = tuple[int, int]


def machine_of() -> str:
    """Names the machine on which ranks can share memory with this one; empty where that cannot be.

    Ranks in network namespaces of their own count as apart, since somebody meant to part them.
    """
    has_calls = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    if os.environ.get(VARIABLE) == "0" or platform.machine() != "x86_64" or not has_calls:
        return ""
    try:
        names = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
        return "/".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *names, str(os.getuid())])
    except OSError:
        return ""


class SharedMemory:
    """Holds the rooms of this rank and those of its peers on the same machine.

    Args:
        rank: this rank.
        world_size: number of ranks.
        timeout: seconds after which a wait fails.
    """

    def __init__(self, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        size = (_START + ROOM) * world_size
        self.file = os.memfd_create(f"partsong rank {rank}")
        os.ftruncate(self.file, size)
        self._own = mmap.mmap(self.file, size)
        self._peers: dict[int, _Peer] = {}

    @classmethod
    def meet(cls, rank: int, world_size: int, timeout: float) -> SharedMemory | None:
        """Opens the rooms of all ranks on this machine; all ranks call it, and it is None where one cannot share.

        Args:
            rank: this rank.
            world_size: number of ranks.
            timeout: seconds after which a wait fails.
        """
        machine = machine_of()
        memory = cls(rank, world_size, timeout) if machine else None
        everyone: list[tuple[str, tuple[int, int]]] = [("", (0, 0))] * world_size
        dist.all_gather_object(everyone, (machine, (os.getpid(), memory.file) if memory else (0, 0)))
        is_open = memory is not None and memory.connect(
            [place if name == machine else None for name, place in everyone]
        )
        opened = [False] * world_size
        dist.all_gather_object(opened, is_open)  # nobody may close a file before all have opened it
        if memory is None or all(opened):
            return memory
        memory.close()
        return None

    def connect(self, places: Sequence[tuple[int, int] | None]) -> bool:
        """Opens the rooms of others; says whether that went well.

        Args:
            places: process and descriptor of each rank's file; None for those that are elsewhere.
        """
        try:
            for rank, place in enumerate(places):
                if place is not None and rank != self.rank:
                    self._peers[rank] = self._open(rank, *place)
        except OSError:
            return False
        return True

    def _open(self, rank: int, process: int, number: int) -> _Peer:
        size = (_START + ROOM) * self.world_size
        with Path(f"/proc/{process}/fd/{number}").open("r+b") as file:
            theirs = mmap.mmap(file.fileno(), size)
        ended = os.pidfd_open(process)
        out = _Out(self._own, rank)
        return _Peer(rank, out, _In(theirs, self.rank), ended, self.timeout)

    @staticmethod
    def takes(size: int) -> bool:
        """Says whether a message of so many bytes goes this way; both ranks know its size."""
        return size <= ROOM // 2

    def reaches(self, ranks: Sequence[int]) -> bool:
        """Says whether all of some ranks are this one or have opened rooms."""
        return all(rank == self.rank or rank in self._peers for rank in ranks)

    def peer(self, rank: int) -> _Peer:
        """Returns the way to and from another rank."""
        return self._peers[rank]

    def close(self) -> None:
        """Tells the peers that nothing more comes, and gives everything back but memory that messages still need."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}
        os.close(self.file)


class _Peer:
    """Sends to and receives from one rank."""

    def __init__(self, rank: int, out: _Out, into: _In, ended: int, timeout: float) -> None:
        self.rank, self._out, self._in, self._ended, self.timeout = rank, out, into, ended, timeout

    def send(self, tensor: Tensor, key: Key) -> _Sent:
        """Copies a contiguous tensor into the room, or keeps it until there is space."""
        return _Sent(self, self._out, self._out.send(tensor, key))

    def receive(self, tensor: Tensor, key: Key) -> _Received:
        """Lets a message of this name fill a contiguous tensor."""
        return _Received(self, self._in, self._in.receive(tensor, key))

    def rest(self, seconds: float) -> None:
        """Sleeps for a moment, and says so where the other process has ended or closed its rooms.

        Raises:
            RuntimeError: it has.
        """
        try:
            is_over = bool(select.select([self._ended], [], [], seconds)[0])
        except (OSError, ValueError):
            raise RuntimeError("this rank has closed its own rooms") from None
        if is_over or self._in.is_closed:
            self._in.drain()
            raise _OverError(f"connection closed by rank {self.rank}")

    def close(self) -> None:
        self._out.close()
        os.close(self._ended)
        self._ended = -1


class _OverError(RuntimeError):
    """Says that a peer has gone; what it sent before has been taken."""


class _Work:
    """Stands for a pending message, as torch's handles do."""

    def __init__(self, peer: _Peer) -> None:
        self._peer = peer

    def is_completed(self) -> bool:
        raise NotImplementedError

    def wait(self, limit: timedelta | None = None) -> bool:
        """Waits until the message has come or gone.

        Args:
            limit: how long; None is the limit of the mesh, and looks for the message all the time at first.

        Raises:
            RuntimeError: the peer is gone, time is up, or the message has another size.
        """
        begin = time.perf_counter()
        last = begin + (self._peer.timeout if limit is None else limit.total_seconds())
        while not self.is_completed():
            waited = (now := time.perf_counter()) - begin
            if limit is None and waited < _LENDING:
                if waited > _LOOKING:
                    os.sched_yield()
                continue
            if now > last:
                raise RuntimeError(f"timed out after {waited:.0f} s, waiting for rank {self._peer.rank}")
            try:
                self._peer.rest(_MOMENT if waited < 1.0 else _LONG_MOMENT)
            except _OverError:
                if not self.is_completed():
                    raise
        return True


class _Received(_Work):
    def __init__(self, peer: _Peer, into: _In, receipt: _Receipt) -> None:
        super().__init__(peer)
        self._in, self._receipt = into, receipt

    def is_completed(self) -> bool:
        if not self._receipt.done:
            self._in.drain()
        if self._receipt.came_instead is not None:
            wanted, size = self._receipt.tensor.nbytes, self._receipt.came_instead
            raise RuntimeError(f"rank {self._peer.rank} sent {size} bytes where {wanted} were expected")
        return self._receipt.done


class _Sent(_Work):
    def __init__(self, peer: _Peer, out: _Out, number: int) -> None:
        super().__init__(peer)
        self._out, self._number = out, number

    def is_completed(self) -> bool:
        return self._out.has_sent(self._number)


class _Receipt:
    """Notes whether a message has filled its tensor, or how many bytes came instead."""

    __slots__ = ("came_instead", "done", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.done = tensor, False
        self.came_instead: int | None = None

    def fill(self, address: int, size: int) -> None:
        if size != self.tensor.nbytes:
            self.came_instead = size
            return
        ctypes.memmove(self.tensor.data_ptr(), address, size)
        self.done = True


class _Room:
    """Gives access to one room of a mapped file."""

    def __init__(self, file: mmap.mmap, place: int) -> None:
        begin = place * (_START + ROOM)
        self.counters = memoryview(file)[begin : begin + _HEAD].cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(file, begin)) + _START
        self.lock = threading.Lock()


class _Out(_Room):
    """Fills the room of one peer."""

    def __init__(self, file: mmap.mmap, place: int) -> None:
        super().__init__(file, place)
        self._posted = self._given = 0
        #: Where messages that may not be taken yet begin and end, oldest first.
        self._live: deque[tuple[int, int]] = deque()
        self._kept: deque[tuple[Tensor, Key]] = deque()
        self._flusher: threading.Thread | None = None

    def send(self, tensor: Tensor, key: Key) -> int:
        """Puts a message in, or keeps it for a thread that does; returns how many there are with it."""
        with self.lock:
            self._given += 1
            if self._kept or not self._put(tensor, key):
                self._kept.append((tensor, key))
                if self._flusher is None:
                    self._flusher = threading.Thread(target=self._flush, name="partsong-full-room", daemon=True)
                    self._flusher.start()
            return self._given

    def has_sent(self, number: int) -> bool:
        """Says whether so many messages are in the room or taken from it."""
        return self._posted >= number

    def _put(self, tensor: Tensor, key: Key) -> bool:
        size = tensor.nbytes
        start = self._space(-(-size // _LINE) * _LINE)
        if start is None:
            return False
        ctypes.memmove(self.address + start, tensor.data_ptr(), size)
        entry = _FIRST_ENTRY + _FIELDS * (self._posted % ENTRIES)
        self.counters[entry], self.counters[entry + 1] = key
        self.counters[entry + 2], self.counters[entry + 3] = start, size
        self._posted += 1
        self.counters[_POSTED] = self._posted
        return True

    def _space(self, size: int) -> int | None:
        """Returns where a message of so many bytes begins; None where there is no space yet."""
        live = self._live
        while len(live) > self._posted - self.counters[_TAKEN]:
            live.popleft()
        if len(live) == ENTRIES:
            return None
        start = 0
        if live:
            oldest, end = live[0][0], live[-1][1]
            limit = ROOM if end > oldest else oldest
            start = end if end + size < limit else 0
            if start == 0 and (limit == oldest or size >= oldest):
                return None
        live.append((start, start + size))
        return start

    def _flush(self) -> None:
        while True:
            with self.lock:
                while self._kept and self._put(*self._kept[0]):
                    self._kept.popleft()
                if not self._kept:
                    self._flusher = None
                    return
            time.sleep(_MOMENT)

    def close(self) -> None:
        self.counters[_CLOSED] = 1


class _In(_Room):
    """Takes messages from the room that a peer fills."""

    def __init__(self, file: mmap.mmap, place: int) -> None:
        super().__init__(file, place)
        self._taken = 0
        self._wanted: defaultdict[Key, deque[_Receipt]] = defaultdict(deque)
        #: Messages that came before anybody had asked for them.
        self._early: defaultdict[Key, deque[ctypes.Array[ctypes.c_char]]] = defaultdict(deque)

    @property
    def is_closed(self) -> bool:
        """Says whether the peer will send nothing more."""
        return self.counters[_CLOSED] != 0

    def receive(self, tensor: Tensor, key: Key) -> _Receipt:
        """Asks for a message."""
        receipt = _Receipt(tensor)
        with self.lock:
            if self._early.get(key):
                early = self._early[key].popleft()
                _forget(self._early, key)
                receipt.fill(ctypes.addressof(early), len(early))
            else:
                self._wanted[key].append(receipt)
        return receipt

    def drain(self) -> None:
        """Takes all messages that are there, in their order."""
        if self.counters[_POSTED] == self._taken:
            return
        with self.lock:
            while self.counters[_POSTED] > self._taken:
                entry = _FIRST_ENTRY + _FIELDS * (self._taken % ENTRIES)
                axis, tag, start, size = self.counters[entry : entry + _FIELDS]
                self._hand_out((axis, tag), self.address + start, size)
                self._taken += 1
                self.counters[_TAKEN] = self._taken

    def _hand_out(self, key: Key, address: int, size: int) -> None:
        if self._wanted.get(key):
            self._wanted[key].popleft().fill(address, size)
            _forget(self._wanted, key)
        else:
            # No tensor: what watches torch would see one whenever ranks are not equally fast.
            early = ctypes.create_string_buffer(size)
            ctypes.memmove(early, address, size)
            self._early[key].append(early)


def _forget(table: dict[Key, Any], key: Key) -> None:
    """Drops an empty queue, since keys are many and hardly come again."""
    if not table[key]:
        del table[key]
