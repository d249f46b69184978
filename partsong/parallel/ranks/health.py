"""Watches which ranks are alive and what each is doing, so that a failed collective can name the responsible rank.

Every rank of a distributed run has a small thread. Twice a second it writes a counter and its current operation to the
rendezvous store, and reads those of the others. When an operation fails, the ranks whose counter has stopped are the
dead ones. A wait cannot succeed once any rank's counter has stopped for `SILENCE` seconds, or an awaited rank left
`DEPARTED` seconds ago. The process is then stopped, as NCCL's own watchdog would do.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch.distributed as dist

from partsong.errors import DistributedError
from partsong.parallel.ranks.blame import ERROR_KEY

__all__ = ["Heartbeat", "note_broken_off", "note_failure", "operation"]

logger = logging.getLogger(__name__)

PERIOD = 0.5
#: Seconds without a sign of life after which a rank counts as dead; with reporting and ending, under 10 seconds.
SILENCE = 6.0
#: Seconds within which every message that a rank sent before it left has arrived.
DEPARTED = 4.0
#: Seconds after which ranks waiting in different operations cannot be explained by a slow link: a rank goes on once its
#: last message is in the buffers of sockets, and those hold a few megabytes.
DIVERGED = 7.0
#: The same where one of them has broken off what it did, such as by an error that its program caught.
BROKEN_OFF = 4.0
_LEFT = "left the run"
_AFTER = " after "


class Heartbeat:
    """Reports this process to the others and watches them; at most one heartbeat runs at a time."""

    current: Heartbeat | None = None

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.doing = "computing"
        self.waiting = False
        self.peers: tuple[int, ...] = ()
        self.operations = 0
        #: What this rank has broken off, until a message reaches it again.
        self.broken_off = ""
        #: The first failure here; the others can read it even after this rank has gone.
        self.failed = ""
        self.since = 0.0
        #: Messages whose handles tell when they have arrived, with what they are for, with whom, and since when.
        self.posted: deque[tuple[Sequence[Any], str, tuple[int, ...], float]] = deque()
        #: Seconds in which this process was running; other ranks are not blamed for the rest.
        self.awake = 0.0
        self._stop = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self._states: dict[int, tuple[str, float]] = {}
        self._users = 0
        self._thread = threading.Thread(target=self._run, name="partsong-heartbeat", daemon=True)

    @classmethod
    def start(cls, rank: int, world_size: int) -> Heartbeat:
        """Starts the heartbeat of a distributed run, or joins the one already beating."""
        if cls.current is None:
            # This is a second connection, since the main thread may block on the first one while ranks connect.
            store = dist.distributed_c10d._get_default_store().clone() if world_size > 1 else None
            cls.current = cls(store, rank, world_size)
            if store is not None:
                cls.current._thread.start()
        cls.current._users += 1
        return cls.current

    def stop(self) -> None:
        """Notifies the others that this rank leaves, once its last user has stopped."""
        self._users -= 1
        if self._users > 0 or self._stop.is_set():
            return
        self._stop.set()
        if self.store is not None:
            self._thread.join(timeout=5.0)
            self._write(f"{_LEFT}{_AFTER}{self.failed}" if self.failed else _LEFT)
        if Heartbeat.current is self:
            Heartbeat.current = None

    def _run(self) -> None:
        beat, last = 0, time.monotonic()
        while not self._stop.is_set():
            beat, now = beat + 1, time.monotonic()
            self.awake += min(now - last, 2 * PERIOD)
            last = now
            state = (
                f"{self.operations} {self.waiting:d} {','.join(map(str, self.peers))} {self.broken_off}|{self.doing}"
            )
            if not self._write(f"{beat}|{state}"):
                return
            self._look()
            self._check()
            self._stop.wait(PERIOD)

    def _check(self) -> None:
        """Ends this process when a message it waits for can no longer arrive."""
        while self.posted and all(work.is_completed() for work in self.posted[0][0]):
            self.posted.popleft()
        if self.posted:  # whatever this process does meanwhile: some wait for a device, not in `operation`
            _, name, peers, since = self.posted[0]
            self._check_peers(name, peers, since)
        if not self.waiting:
            return
        now = self.awake
        self._check_peers(self.doing, self.peers, self.since)
        patience = self._patience()
        elsewhere = self._deadlocked_with(now) if now - self.since > patience else []
        if elsewhere:
            others = "; ".join(f"rank {r}{self._told(r)} waits in {_doing(self._states[r][0])}" for r in elsewhere)
            why = f"for {patience:.0f} s{self._told(self.rank)}, while {others}: the ranks made different calls"
            self._give_up(self.doing, sorted(elsewhere, key=lambda rank: not self._broken_off(rank)), why)

    def _check_peers(self, name: str, peers: Sequence[int], since: float) -> None:
        silent = [rank for rank in self._seen if self.silence(rank) > SILENCE]
        if silent:
            self._give_up(name, silent, f"silent for {SILENCE:.0f} s (stopped, or its machine is gone)")
        # The clock starts with this wait, since the message may still be in transit when the sender has left.
        gone = [r for r, (text, at) in self._seen.items() if _left(text) and self.awake - max(at, since) > DEPARTED]
        left = [rank for rank in gone if rank in peers]
        if left:
            cause = self._seen[left[0]][0].partition(_AFTER)[2]
            # Closing what it had open may keep a rank from reporting its error itself.
            why = f"after {cause}" if cause else "(it made fewer calls than the others)"
            self._give_up(name, left, f"which left the run {DEPARTED:.0f} s ago {why}")

    def _patience(self) -> float:
        """Returns the seconds after which ranks that wait in different operations are a deadlock."""
        return BROKEN_OFF if any(map(self._broken_off, (self.rank, *self._states))) else DIVERGED

    def _broken_off(self, rank: int) -> str:
        return self.broken_off if rank == self.rank else _fields(self._states[rank][0])[3]

    def _told(self, rank: int) -> str:
        broken_off = self._broken_off(rank)
        return f" (which has broken off {broken_off})" if broken_off else ""

    def _deadlocked_with(self, now: float) -> list[int]:
        """Lists ranks that wait in another operation, if every rank this one depends on is waiting.

        A peer that waits for a rank that still computes is only late; then the list is empty.
        """
        reached, open_ends, patience = {self.rank}, list(self.peers), self._patience()
        while open_ends:
            rank = open_ends.pop()
            if rank in reached:
                continue
            reached.add(rank)
            state, since = self._states.get(rank, ("", now))
            _, waits, peers, _ = _fields(state)
            if waits != "1" or now - since <= patience:
                return []
            open_ends += [int(peer) for peer in peers.split(",") if peer]
        return sorted(r for r in reached - {self.rank} if _doing(self._states[r][0]) != self.doing)

    def _write(self, text: str) -> bool:
        try:
            self.store.set(f"partsong/beat/{self.rank}", text)
        except (RuntimeError, dist.DistStoreError):
            return False  # the store is gone with its host, which the collectives report
        return True

    def _look(self) -> None:
        for rank in range(self.world_size):
            key = f"partsong/beat/{rank}"
            try:
                text = self.store.get(key).decode() if rank != self.rank and self.store.check([key]) else ""
            except (RuntimeError, dist.DistStoreError):
                return
            if text and self._seen.get(rank, ("", 0.0))[0] != text:
                self._seen[rank] = (text, self.awake)
                state = text.partition("|")[2]
                if self._states.get(rank, ("", 0.0))[0] != state:
                    self._states[rank] = (state, self.awake)

    def silence(self, rank: int) -> float:
        """Returns the seconds since `rank` was last seen alive; 0 if it has left the run properly."""
        text, when = self._seen.get(rank, (_LEFT, 0.0))
        return 0.0 if _left(text) else self.awake - when

    def computes(self, rank: int) -> bool:
        """Says whether another rank is alive and waits for nobody, as far as is known here."""
        text, (state, _) = self._seen.get(rank, ("", 0.0))[0], self._states.get(rank, ("", 0.0))
        waits = _fields(state)[1] == "1"
        return bool(text) and not _left(text) and not waits and self.silence(rank) <= 3 * PERIOD

    def _give_up(self, doing: str, ranks: list[int], why: str) -> None:
        names = ", ".join(map(str, ranks))
        message = f"rank {self.rank} waits in {doing} for rank {names}, {why}; the run is ended"
        logger.critical(message)
        self.report(message, self.rank if self.broken_off else ranks[0])
        os._exit(70)

    def report(self, message: str, rank: int) -> None:
        """Writes the first error of the run to the store, where the launcher reads it."""
        try:
            _root(self.store).compare_set(ERROR_KEY, "", f"{rank}|{message}")
        except (RuntimeError, dist.DistStoreError):
            logger.debug("the store is gone; the error stays in this process")

    def blame(self) -> str:
        """Watches for a few seconds, then says which ranks are dead and what the others are doing."""
        deadline = time.monotonic() + 6 * PERIOD
        while time.monotonic() < deadline:
            self._stop.wait(PERIOD)
            dead = [r for r in range(self.world_size) if r != self.rank and self.silence(r) > 3 * PERIOD]
            gone = {r: text for r, (text, _) in self._seen.items() if _left(text)}
            if dead or gone:
                names = [f"rank {r} is dead" for r in dead] + [f"rank {r} has {text}" for r, text in gone.items()]
                return "; ".join(names)
        doing = [f"rank {r} is in {_doing(state)}" for r, (state, _) in sorted(self._states.items())]
        return "; ".join(doing) or "no other rank has been seen"


def watch(works: Sequence[Any], name: str, peers: Sequence[int]) -> None:
    """Lets the heartbeat watch posted messages, whether or not this process waits for them.

    A wait for NCCL's returns at once, and the process then stands wherever it needs the numbers.

    Args:
        works: handles of the messages, which tell by themselves when they have arrived, as NCCL's do and gloo's do not.
        name: what they are for.
        peers: global ranks that send or receive them.
    """
    beat = Heartbeat.current
    if beat is not None:
        beat.posted.append((works, name, tuple(peers), beat.awake))


def operation(name: str, peers: Sequence[int] = ()) -> AbstractContextManager[None]:
    """Notes what this rank waits for, and turns a failure into an error that names the responsible rank.

    Args:
        name: what the rank does, for messages.
        peers: global ranks that it depends on.

    Raises:
        DistributedError: the operation failed; the message names it, this rank and the dead or diverging ranks.
    """
    return _Operation(name, peers)


class _Operation(AbstractContextManager[None]):
    # A class, since every message passes through it and a generator costs three times as much.
    __slots__ = ("_beat", "_name", "_outer", "_peers")

    def __init__(self, name: str, peers: Sequence[int]) -> None:
        self._name, self._peers = name, peers

    def __enter__(self) -> None:
        self._beat = beat = Heartbeat.current
        if beat is not None:
            self._outer = beat.doing
            beat.operations += 1
            beat.doing, beat.peers, beat.since, beat.waiting = self._name, tuple(self._peers), beat.awake, True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        beat, name = self._beat, self._name
        if beat is None:
            return
        try:
            if isinstance(error, RuntimeError | ValueError) and not isinstance(error, DistributedError):
                beat.failed = beat.failed or f"a failure in {name}"
                blame = beat.blame() if beat.store is not None else ""
                message = f"{name} failed on rank {beat.rank}: {blame} ({_first_line(error)})"
                raise DistributedError(message) from error
        finally:
            beat.doing, beat.peers, beat.waiting = self._outer, (), False


def _left(text: str) -> bool:
    return text.startswith(_LEFT)


def note_failure(error: BaseException) -> None:
    """Notes the error that ends this rank's work, for ranks that wait for the rest of it."""
    beat = Heartbeat.current
    if beat is not None and not isinstance(error, DistributedError):
        beat.failed = beat.failed or f"{type(error).__name__}: {_first_line(error)}"


def note_broken_off(what: str) -> None:
    """Notes what this rank has left unfinished, for ranks that wait for the rest of it; empty for nothing."""
    if Heartbeat.current is not None:
        Heartbeat.current.broken_off = what


def _fields(state: str) -> list[str]:
    """Returns a rank's number of operations, whether it waits, for which ranks, and what it has broken off."""
    *fields, broken_off = (state.rpartition("|")[0] + "   ").split(" ", 3)
    return [*fields, broken_off.strip()]


def _doing(state: str) -> str:
    return state.rpartition("|")[2]


def _root(store: Any) -> Any:
    """Returns the store without torch's prefixes, which the launcher does not know."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
