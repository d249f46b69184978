"""Checks the line between a server and its ranks, with a rank that is a thread and says what a test wants."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import pytest

from partsong.errors import DistributedError, PartsongError
from partsong.serving import replica as replica_module
from partsong.serving.messages import Cancel, Check, FilePart, FromRanks, JobFailed, JobFinished, JobWork, Ready, Stop
from partsong.serving.ranks.settings import ReplicaSettings
from partsong.serving.replica import Replica
from partsong.serving.runners import RankRunner

READY = Ready(strategies=(), defaults={}, kind="image")


class Heard:
    """What a replica told its server."""

    def __init__(self) -> None:
        self.messages: list[FromRanks] = []
        self.errors: list[PartsongError] = []
        self.changed = asyncio.Event()

    def take(self, replica: Replica, message: FromRanks) -> None:
        self.messages.append(message)
        self.changed.set()

    def down(self, replica: Replica, error: PartsongError) -> None:
        self.errors.append(error)
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 20)


def _replica(heard: Heard, say: Callable[[Connection], None], host: str | None = "127.0.0.1") -> Replica:
    def run(settings: ReplicaSettings, nproc: int, closing: threading.Event) -> None:
        with Client(settings.address, authkey=settings.authkey) as line:
            line.send(READY)
            say(line)

    settings = ReplicaSettings(folder=Path("x"), pipeline="X", defaults={}, loras={}, address="", authkey=b"")
    runner = RankRunner(run=run, host=host)
    return Replica("m", 1, settings, runner=runner, on_message=heard.take, on_down=heard.down)


def _until_stopped(line: Connection) -> None:
    while not isinstance(line.recv(), Stop):
        pass


def test_a_file_arrives_in_pieces_before_the_job_is_done(tmp_path: Path) -> None:
    async def follow() -> None:
        heard, path, seen = Heard(), tmp_path / "a.mp4", []
        path.write_bytes(b"what an earlier try left behind")

        def say(line: Connection) -> None:
            for data in (b"one", b"two"):
                line.send(FilePart(id="a", path=path, data=data, is_first=data == b"one"))
            line.send(JobFinished(id="a", spent=(), seconds=1.0))
            _until_stopped(line)

        def take(replica: Replica, message: FromRanks) -> None:
            seen.append(path.read_bytes())
            Heard.take(heard, replica, message)

        heard.take = take  # type: ignore[method-assign]
        replica = _replica(heard, say)
        replica.start()
        await heard.until(lambda: len(heard.messages) == 2)
        assert seen[-1] == b"onetwo"
        await replica.close()
        assert heard.errors == []

    asyncio.run(follow())


def test_a_file_that_cannot_be_written_fails_its_job_and_stops_it(tmp_path: Path) -> None:
    async def follow() -> None:
        heard, asked = Heard(), []

        def say(line: Connection) -> None:
            line.send(FilePart(id="a", path=tmp_path / "no folder" / "a.png", data=b"x", is_first=True))
            asked.append(line.recv())
            _until_stopped(line)

        replica = _replica(heard, say)
        replica.start()
        await heard.until(lambda: len(heard.messages) == 2)
        failed = heard.messages[1]
        assert isinstance(failed, JobFailed)
        assert "a.png cannot be written: No such file" in str(failed.error)
        await replica.close()
        assert asked == [Cancel("a")]

    asyncio.run(follow())


def test_somebody_without_the_key_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "_GREETING", 0.3)

    async def follow() -> None:
        heard, begins = Heard(), threading.Event()
        replica = _replica(heard, _until_stopped)
        run = replica._runner.run

        def run_late(*args: Any) -> None:
            begins.wait()
            run(*args)

        replica._runner = RankRunner(run=run_late, host="127.0.0.1")
        replica.start()
        address: Any = replica._listener.address
        with socket.create_connection(address) as silent, socket.create_connection(address) as loud:
            loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            begins.set()
            await heard.until(lambda: len(heard.messages) == 1)
            assert silent.recv(1000).startswith(b"\x00")  # what it was asked; then it was cut off
        assert replica.is_ready
        await replica.close()

    asyncio.run(follow())


def test_ranks_that_hang_up_leave_no_question_open() -> None:
    """Another replica can be asked before the processes of these have ended."""
    refused, seen = threading.Event(), []

    def say(line: Connection) -> None:
        if not seen:
            seen.append(line.recv())
            line.close()
            seen.append(refused.wait(5.0))
        else:
            _until_stopped(line)

    async def follow() -> None:
        heard = Heard()
        replica = _replica(heard, say, host=None)
        replica.start()
        await heard.until(lambda: len(heard.messages) == 1)
        check = Check(JobWork(id="a", prompt="", arguments={}, out=()))
        with pytest.raises(DistributedError, match="ranks of m have hung up"):
            await replica.check(check.work)
        refused.set()
        await heard.until(lambda: len(heard.messages) == 2)
        await replica.close()
        assert seen == [check, True]

    asyncio.run(follow())


def test_ranks_that_are_gone_with_their_machine_do_not_keep_the_next_ones_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first line stays open though its ranks have ended, as one to a machine without power does."""
    monkeypatch.setattr(replica_module, "_LATE", 0.3)

    async def follow() -> None:
        heard, lines = Heard(), []

        def say(line: Connection) -> None:
            if not lines:
                lines.append(line)
                raise DistributedError("its machine is gone")
            _until_stopped(line)

        replica = _replica(heard, say)
        real = Connection.close
        monkeypatch.setattr(Connection, "__exit__", lambda line, *error: None if lines == [line] else real(line))
        replica.start()
        await heard.until(lambda: len(heard.messages) == 2)
        assert [str(error) for error in heard.errors] == ["its machine is gone"]
        assert heard.messages == [READY, READY]
        await replica.close()
        lines[0].close()

    asyncio.run(follow())
