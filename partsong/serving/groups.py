"""Keeps a group of ranks alive for one model: starts it, talks to it, and starts it anew when a rank dies."""

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
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
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
from partsong.serving.ranks.settings import GroupSettings
from partsong.serving.runners import RankRunner

__all__ = ["WorkerGroup"]

_log = logging.getLogger(__name__)

#: Starts that may fail one after the other before the group is given up, and seconds of rest before the next.
_STARTS, _REST = 3, 1.0
#: Seconds that ranks have to end by themselves.
_GRACE = 3.0
#: Seconds in which whoever connects has to show the key.
_GREETING = 10.0
#: Seconds in which a line is read on whose ranks have ended.
_LATE = 5.0
#: Seconds in which another machine has to answer.
_SILENCE = 20
#: Pulses that may be missing before the group no longer counts as ready.
_MISSED = 30


class WorkerGroup:
    """Keeps ranks running, and reports what they say on the server's event loop.

    Args:
        name: of the model.
        nproc: number of ranks.
        settings: what they serve.
        runner: runs them once.
        on_message: takes what the ranks say.
        on_down: takes the error that ended the ranks; they are started anew unless the second argument is True.

    Attributes:
        facts: what the ranks said of their model when they were ready last; None before.
        broken: why the group was given up; None while it was not.
    """

    def __init__(
        self,
        name: str,
        nproc: int,
        settings: GroupSettings,
        *,
        runner: RankRunner,
        on_message: Callable[[WorkerGroup, FromRanks], None],
        on_down: Callable[[WorkerGroup, PartsongError], None],
    ) -> None:
        self.name, self.nproc = name, nproc
        self.facts: Ready | None = None
        self.broken: PartsongError | None = None
        self._runner, self._on_message, self._on_down = runner, on_message, on_down
        self._loop = asyncio.get_running_loop()
        authkey = os.urandom(32)
        # The key is asked for in `_greet`, which does not wait for ever.
        self._listener = Listener() if runner.host is None else Listener((runner.host, 0))
        address: Any = self._listener.address
        self._settings = replace(settings, address=address, authkey=authkey, sends_files=runner.host is not None)
        self._authkey = authkey
        self._line: Connection | None = None
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._heard = 0.0
        self._is_up = False
        self._hung_up = threading.Event()
        self._ended = self._accepted = 0  # runs that have ended, now and when the line was accepted
        self._checks: dict[str, asyncio.Future[Checked]] = {}
        self._threads = [
            threading.Thread(target=target, name=f"{what} {name}", daemon=True)
            for what, target in (("ranks of", self._run), ("line to", self._listen))
        ]

    def start(self) -> None:
        """Starts the ranks; returns at once."""
        for thread in self._threads:
            thread.start()

    @property
    def is_ready(self) -> bool:
        """Says whether all ranks have answered lately."""
        return self._is_up and time.monotonic() - self._heard < _MISSED * self._settings.pulse

    def send(self, message: ToRanks) -> bool:
        """Asks the ranks for something; says whether there was a line to them."""
        with self._sending:
            if self._line is None:
                return False
            try:
                self._line.send(message)
            except OSError:  # they have just ended; what ends them is reported by the other thread
                return False
            return True

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
            child.terminate()  # they load a model, or make a long call, and all groups end together
        self._threads[0].join()
        # A caller wakes the other thread up if it waits for one; if it has ended already, nobody answers the call.
        threading.Thread(target=self._ring, daemon=True).start()
        self._threads[1].join(5.0)
        self._listener.close()

    def _ring(self) -> None:
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            Client(self._listener.address, authkey=self._authkey).close()

    def _run(self) -> None:
        """Runs the ranks again and again; in a thread of its own."""
        failed = 0
        while not self._closing.is_set() and failed < _STARTS:
            self._hung_up.clear()
            error: PartsongError = DistributedError(f"the ranks of {self.name} ended")
            try:
                self._runner.run(self._settings, self.nproc, self._closing)
            except PartsongError as raised:
                error = raised
            self._ended += 1  # before it looks for a line, as the other thread looks here once it has one
            if self._line is not None and not self._hung_up.wait(_LATE):  # what they said before they ended comes first
                self._hang_up()
            failed = 0 if self._is_up else failed + 1
            if self._closing.is_set():
                return
            _log.warning("the ranks of %s ended: %s", self.name, error)
            self._call(self._down, error, failed >= _STARTS)
            self._closing.wait(_REST if failed else 0.0)

    def _hang_up(self) -> None:
        """Ends a line whose other end is gone with its machine, which nothing else would tell.

        The lock is not asked for: who holds it may be sending to that machine, and waits for this.
        """
        line = self._line
        if line is not None:
            _cut(line)
            self._hung_up.wait(5.0)

    def _listen(self) -> None:
        """Takes what the ranks say, of one start after the other; in a thread of its own."""
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
            if self._ended != self._accepted:  # its ranks have ended meanwhile, and saw no line to hang up
                late.start()
            with contextlib.suppress(EOFError, OSError):
                while True:
                    message = line.recv()
                    if isinstance(message, FilePart):
                        self._write(message)
                    else:
                        self._call(self._take, message)
            late.cancel()
            with self._sending:
                self._line = None
                line.close()
            self._hung_up.set()

    def _greet(self) -> Connection | None:
        """Waits for somebody to connect; returns the line, or None for one who does not show the key in time."""
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
        """Writes a piece of a file that the ranks cannot write themselves, before what they say of it is heard."""
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
        except RuntimeError:  # the loop has ended before the ranks did
            self._closing.set()

    def _take(self, message: FromRanks) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Checked):
            if (future := self._checks.get(message.id)) is not None and not future.done():
                future.set_result(message)
            return
        if isinstance(message, Ready):
            self.facts, self._is_up = message, True
        if not isinstance(message, Pulse):
            self._on_message(self, message)

    def _down(self, error: PartsongError, is_final: bool) -> None:
        self._is_up = False
        if is_final:
            self.broken = error
        for future in self._checks.values():
            if not future.done():
                future.set_exception(DistributedError(f"the ranks of {self.name} ended: {error}"))
        self._on_down(self, error)


def _cut(line: Connection) -> None:
    """Ends a line from this side; a thread that reads it gets an error."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _watch(line: Connection) -> None:
    """Has the system end a line to another machine when that has not answered for a while."""
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
