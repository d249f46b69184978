"""Keeps one replica of a model alive: starts its ranks, talks to them, and restarts them when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

from partsong.errors import DistributedError, OutputError, PartsongError
from partsong.serving.messages import (
    Cancel,
    Check,
    Checked,
    FilePart,
    FromRanks,
    JobFailed,
    JobWork,
    Pulse,
    Ready,
    Stop,
    ToRanks,
)
from partsong.serving.ranks.settings import ReplicaSettings
from partsong.serving.runners import RankRunner

__all__ = ["Replica", "StartTrouble"]

_log = logging.getLogger(__name__)

#: Failed starts in a row from which on nobody is let to wait for the next one.
_STARTS = 3
#: Seconds of the pause after the first failed start, which doubles with each further one, and of the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 300.0
#: Seconds that ranks get to end by themselves.
_GRACE = 3.0
#: Seconds in which a new connection has to show the key.
_GREETING = 10.0
#: Seconds for which a connection is still read after its ranks have ended.
_LATE = 5.0
#: Seconds in which another machine must answer.
_SILENCE = 20
#: Pulses that may be missing before the replica no longer counts as ready.
_MISSED = 30


@dataclass(frozen=True, slots=True)
class StartTrouble:
    """Says that the last starts of a replica have failed; printed, it tells how many, why and when the next one is.

    Attributes:
        starts: how many in a row.
        error: why the last one did.
        next_at: when the next one is, by `time.monotonic`.
    """

    starts: int
    error: PartsongError
    next_at: float

    @property
    def seconds_left(self) -> float:
        """Returns the seconds until the next start."""
        return max(0.0, self.next_at - time.monotonic())

    def __str__(self) -> str:
        when = f"the next one is in {self.seconds_left:.0f} s"
        return f"{self.starts} starts of its ranks in a row failed, and {when}; the last said: {self.error}"


class Replica:
    """Keeps the ranks of one copy of a model running, and reports what they say on the server's event loop.

    Args:
        name: of the model.
        nproc: number of ranks.
        settings: what the ranks serve.
        runner: runs the ranks once.
        on_message: takes what the ranks say.
        on_down: takes the error that ended the ranks; they are started anew.

    Attributes:
        facts: what the ranks said of their model when they last became ready; None before.
        memory: bytes that the first rank held when it last answered.
        trouble: what is known of starts that fail; None where the ranks are up, or are expected to come up.
    """

    def __init__(
        self,
        name: str,
        nproc: int,
        settings: ReplicaSettings,
        *,
        runner: RankRunner,
        on_message: Callable[[Replica, FromRanks], None],
        on_down: Callable[[Replica, PartsongError], None],
    ) -> None:
        self.name, self.nproc = name, nproc
        self.facts: Ready | None = None
        self.trouble: StartTrouble | None = None
        self.memory = 0
        self._runner, self._on_message, self._on_down = runner, on_message, on_down
        self._loop = asyncio.get_running_loop()
        authkey = os.urandom(32)
        # The key is checked in `_greet`, which does not wait forever.
        self._listener = Listener() if runner.host is None else Listener((runner.host, 0))
        address: Any = self._listener.address
        self._settings = replace(settings, address=address, authkey=authkey, sends_files=runner.host is not None)
        self._authkey = authkey
        self._line: Connection | None = None
        self._sending = threading.Lock()
        self._outbox: SimpleQueue[tuple[Connection, memoryview] | None] = SimpleQueue()
        self._closing = threading.Event()
        self._heard = 0.0
        self._is_up = False
        self._has_started = False  # whether this run has become ready, as its own threads know it
        self._hung_up = threading.Event()
        self._ended = self._accepted = 0  # runs that have ended, counted now and when the connection was accepted
        self._checks: dict[str, asyncio.Future[Checked]] = {}
        self._threads = [
            threading.Thread(target=target, name=f"{what} {name}", daemon=True)
            for what, target in (("ranks of", self._run), ("line to", self._listen), ("post to", self._post))
        ]

    def start(self) -> None:
        """Starts the ranks; returns at once."""
        for thread in self._threads:
            thread.start()

    @property
    def is_ready(self) -> bool:
        """Says whether all ranks have answered recently."""
        return self._is_up and time.monotonic() - self._heard < _MISSED * self._settings.pulse

    def send(self, message: ToRanks) -> bool:
        """Asks the ranks for something; says whether they are connected.

        It returns at once: ranks that are busy read late, and the event loop does not wait for them.
        """
        line = self._line
        if line is not None:
            self._outbox.put((line, ForkingPickler.dumps(message)))
        return line is not None

    async def check(self, work: JobWork) -> Checked:
        """Asks whether a job could be carried out.

        Raises:
            DistributedError: the ranks are not there.
        """
        answer = self._checks[work.id] = self._loop.create_future()
        try:
            if not (self._is_up and self.send(Check(work))):
                raise DistributedError(f"the ranks of {self.name} are starting; try again in a few seconds")
            return await asyncio.wait_for(answer, 30.0)
        except TimeoutError:
            raise DistributedError(f"the ranks of {self.name} do not answer") from None
        finally:
            self._checks.pop(work.id, None)

    async def close(self) -> None:
        """Ends the ranks."""
        self._closing.set()
        self.send(Stop())
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        self._threads[0].join(_GRACE)
        for child in multiprocessing.active_children() if self._threads[0].is_alive() else ():
            child.terminate()  # they are loading a model or making a long call, and all replicas end together
        self._threads[0].join()
        # Connecting wakes the other thread if it waits for a connection; if it has ended already, nobody answers.
        threading.Thread(target=self._ring, daemon=True).start()
        self._threads[1].join(5.0)
        self._outbox.put(None)
        self._listener.close()

    def _ring(self) -> None:
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            Client(self._listener.address, authkey=self._authkey).close()

    def _run(self) -> None:
        """Runs the ranks, again after each end; in a thread of its own."""
        failed = 0
        while not self._closing.is_set():
            self._hung_up.clear()
            self._has_started = False
            error: PartsongError = DistributedError(f"the ranks of {self.name} ended")
            try:
                self._runner.run(self._settings, self.nproc, self._closing)
            except PartsongError as raised:
                error = raised
            self._ended += 1  # set before it looks for a connection, since the other thread reads it once it has one
            if self._line is not None and not self._hung_up.wait(
                _LATE
            ):  # messages sent before the end are handled first
                self._hang_up()
            failed = 0 if self._has_started else failed + 1
            if self._closing.is_set():
                return
            _log.warning("the ranks of %s ended: %s", self.name, error)
            pause = 0.0 if not failed else min(_FIRST_PAUSE * 2 ** min(failed - 1, 30), _LONGEST_PAUSE)
            self._call(self._down, error, failed, time.monotonic() + pause)
            self._closing.wait(pause)

    def _post(self) -> None:
        """Sends what `send` was given, in order; in a thread of its own."""
        while (item := self._outbox.get()) is not None:
            line, message = item
            with self._sending, contextlib.suppress(OSError):  # they have ended; another thread reports the cause
                if line is self._line:
                    line.send_bytes(message)

    def _hang_up(self) -> None:
        """Closes a connection whose other end vanished with its machine, which nothing else would reveal.

        It takes no lock: the holder may be sending to that machine, and would wait for this.
        """
        line = self._line
        if line is not None:
            _cut(line)
            self._hung_up.wait(5.0)

    def _listen(self) -> None:
        """Reads the messages of the ranks, one start after the other; in a thread of its own."""
        while not self._closing.is_set():
            line = self._greet()
            if line is None:
                continue
            if self._closing.is_set():
                line.close()
                return
            with self._sending:
                self._line = line
            late = threading.Timer(_LATE, _cut, [line])
            if self._ended != self._accepted:  # its ranks ended meanwhile, before there was a connection to close
                late.start()
            with contextlib.suppress(EOFError, OSError):
                while True:
                    message = line.recv()
                    self._has_started |= isinstance(message, Ready)
                    if isinstance(message, FilePart):
                        self._write(message)
                    else:
                        self._call(self._take, message)
            late.cancel()
            with self._sending:
                self._line = None
                line.close()
            self._call(self._answer_none, DistributedError(f"the ranks of {self.name} have hung up"))
            self._hung_up.set()

    def _greet(self) -> Connection | None:
        """Waits for a connection; returns it, or None if it does not show the key in time."""
        try:
            line: Any = self._listener.accept()
        except OSError:
            return None
        self._accepted = self._ended
        if self._runner.host is not None:
            _watch(line)
        patience = threading.Timer(_GREETING, _cut, [line])
        patience.start()
        try:
            deliver_challenge(line, self._authkey)
            answer_challenge(line, self._authkey)
            return line
        except (OSError, EOFError, AuthenticationError):
            line.close()
            return None
        finally:
            patience.cancel()

    def _write(self, part: FilePart) -> None:
        """Writes a piece of a file that the ranks cannot write themselves, before their message about it is handled."""
        try:
            with part.path.open("wb" if part.is_first else "ab") as file:
                file.write(part.data)
        except OSError as error:
            failure = OutputError(f"{part.path.name} cannot be written: {error.strerror}; is the disk full?")
            self.send(Cancel(part.id))
            self._call(self._take, JobFailed(part.id, failure))

    def _call(self, action: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(action, *args)
        except RuntimeError:  # the event loop ended before the ranks did
            self._closing.set()

    def _take(self, message: FromRanks) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Checked):
            if (future := self._checks.get(message.id)) is not None and not future.done():
                future.set_result(message)
            return
        if isinstance(message, Ready):
            self.facts, self._is_up, self.trouble = message, True, None
        if isinstance(message, Pulse):
            self.memory = message.memory
        else:
            self._on_message(self, message)

    def _down(self, error: PartsongError, failed: int, next_at: float) -> None:
        self._is_up = False
        self.trouble = StartTrouble(failed, error, next_at) if failed >= _STARTS else None
        self._answer_none(DistributedError(f"the ranks of {self.name} ended: {error}"))
        self._on_down(self, error)

    def _answer_none(self, error: PartsongError) -> None:
        """Ends the waiting for answers that do not come any more."""
        for future in self._checks.values():
            if not future.done():
                future.set_exception(error)


def _cut(line: Connection) -> None:
    """Closes a connection from this side; a thread that reads it gets an error."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _watch(line: Connection) -> None:
    """Has the system close a connection to another machine that has not answered for a while."""
    with socket.socket(fileno=os.dup(line.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for option, value in (
                (socket.TCP_KEEPIDLE, _SILENCE // 2),
                (socket.TCP_KEEPINTVL, _SILENCE // 4),
                (socket.TCP_KEEPCNT, 2),
                (socket.TCP_USER_TIMEOUT, 1000 * _SILENCE),
            ):
                end.setsockopt(socket.IPPROTO_TCP, option, value)
