"""Checks requests that wait for ranks, and ranks that cannot be started, with ranks that are threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import httpx
import pytest

from partsong.errors import DistributedError
from partsong.serving import replica as replica_module
from partsong.serving.app import build_app
from partsong.serving.arrivals import Arrivals
from partsong.serving.catalog import picture_model
from partsong.serving.errors import CannotMakeError
from partsong.serving.limits import Limits
from partsong.serving.messages import Check, Checked, Ready, Stop
from partsong.serving.ranks.settings import ReplicaSettings
from partsong.serving.runners import RankRunner
from partsong.serving.server import Server


class Ranks:
    """Ranks whose first starts fail, and which then answer once they may."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.starts = failures, 0
        self.may_start, self.may_fail = threading.Event(), threading.Event()
        self.may_fail.set()

    def run(self, settings: ReplicaSettings, nproc: int, closing: threading.Event) -> None:
        self.starts += 1
        if self.starts <= self.failures:
            assert self.may_fail.wait(30)
            raise DistributedError(f"start {self.starts} found no GPU")
        assert self.may_start.wait(30)
        with Client(settings.address, authkey=settings.authkey) as line, contextlib.suppress(EOFError):
            line.send(Ready(strategies=(), defaults={}, kind="image"))
            while not isinstance(message := line.recv(), Stop):
                if isinstance(message, Check):
                    wrong = CannotMakeError("it cannot make size 1x1", "size")
                    is_wrong = message.work.arguments.get("height") == 1
                    line.send(Checked(id=message.work.id, error=wrong if is_wrong else None))


@contextlib.asynccontextmanager
async def _serving(folder: Path, ranks: Ranks, **limits: Any) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    server = Server(
        models=(picture_model("shapes", nproc=1, strategies=(), loras={}),),
        folder=folder,
        runner=RankRunner(run=ranks.run, host="127.0.0.1"),
        limits=Limits(**limits),
    )
    server.open()
    await server.start()
    try:
        transport = httpx.ASGITransport(build_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield server, client
    finally:
        ranks.may_start.set()
        await server.close()


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)


def _job(**more: Any) -> dict[str, Any]:
    return {"kind": "image", "prompt": "a red circle", **more}


def test_a_request_waits_for_ranks_that_start(tmp_path: Path) -> None:
    async def ask() -> None:
        ranks = Ranks()
        async with _serving(tmp_path, ranks) as (server, client):
            asked = [asyncio.create_task(client.post("/v1/jobs", json=_job(**more))) for more in ({}, {"size": "1x1"})]
            await _until(lambda: server.rooms["shapes"]._arrivals.num == 2)
            assert not any(task.done() for task in asked)
            ranks.may_start.set()
            made, refused = [await task for task in asked]
            assert made.status_code == 202, made.text
            error = {"message": "it cannot make size 1x1", "type": "invalid_request_error"}
            assert refused.json()["error"] == error | {"param": "size", "code": "invalid_value"}

    asyncio.run(ask())


def test_who_has_waited_long_enough_is_told_when_to_come_back(tmp_path: Path) -> None:
    async def ask() -> None:
        async with _serving(tmp_path, Ranks(), start_seconds=0.05) as (_, client):
            reply = await client.post("/v1/images/generations", json={"prompt": "a red circle"})
            assert (reply.status_code, reply.headers["Retry-After"]) == (503, "5")
            assert "starting, and did not answer within 0.05 s" in reply.json()["error"]["message"]

    asyncio.run(ask())


def test_no_more_wait_than_may_and_none_for_a_server_that_ends(tmp_path: Path) -> None:
    async def ask() -> None:
        async with _serving(tmp_path, Ranks(), waiting=1) as (server, client):
            first = asyncio.create_task(client.post("/v1/jobs", json=_job()))
            await _until(lambda: server.rooms["shapes"]._arrivals.num == 1)
            assert (await client.post("/v1/jobs", json=_job())).status_code == 429
            server.leave(0.0)
            reply = await first
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_ends")

    asyncio.run(ask())


def test_ranks_that_cannot_be_started_are_tried_until_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "_FIRST_PAUSE", 0.001)

    async def ask() -> None:
        ranks = Ranks(failures=5)
        ranks.may_fail.clear()
        async with _serving(tmp_path, ranks) as (server, client):
            waits = asyncio.create_task(client.post("/v1/jobs", json=_job()))
            await _until(lambda: server.rooms["shapes"]._arrivals.num == 1)
            assert (await client.get("/health")).json() == {"status": "ok"}
            ranks.may_fail.set()
            reply = await waits  # it ends with the third failure, and not before
            assert reply.status_code == 503
            assert "Retry-After" in reply.headers
            assert "found no GPU" in reply.json()["error"]["message"]
            await _until(lambda: ranks.starts == 6)
            await _until(lambda: server.troubles["shapes"].starts == 5)
            health = (await client.get("/health")).json()
            assert health["status"] == "degraded"
            assert health["models"]["shapes"].endswith("the last said: start 5 found no GPU")
            assert (await client.get("/ready")).status_code == 503
            metrics = (await client.get("/metrics")).text
            assert 'partsong_starts_failed{model="shapes",reason="start 5 found no GPU"} 5.0' in metrics
            ranks.may_start.set()
            await _until(lambda: not server.troubles)
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert "found no GPU" not in (await client.get("/metrics")).text
            assert (await client.post("/v1/jobs", json=_job())).status_code == 202

    asyncio.run(ask())


def test_pauses_grow_and_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    class NoWait(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return len(pauses) == 12 and (self.set() or True)

    def run(settings: ReplicaSettings, nproc: int, closing: threading.Event) -> None:
        raise DistributedError("no GPU")

    async def start() -> None:
        settings = picture_model("shapes", nproc=1, strategies=(), loras={}).settings
        heard: dict[str, Any] = {"on_message": lambda *_: None, "on_down": lambda *_: None}
        replica = replica_module.Replica("m", 1, settings, runner=RankRunner(run=run, host="127.0.0.1"), **heard)
        replica._closing = NoWait()
        await asyncio.to_thread(replica._run)
        replica._listener.close()

    asyncio.run(start())
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0, 300.0]


def test_a_client_whose_ranks_cannot_be_started_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks take a job, die before it begins, and cannot be started again."""
    monkeypatch.setattr(replica_module, "_FIRST_PAUSE", 0.001)

    class Dying(Ranks):
        def run(self, settings: ReplicaSettings, nproc: int, closing: threading.Event) -> None:
            self.starts += 1
            if self.starts > 1:
                assert self.starts < 5 or self.may_start.wait(30)
                raise DistributedError("found no GPU")
            with Client(settings.address, authkey=settings.authkey) as line:
                line.send(Ready(strategies=(), defaults={}, kind="image"))
                while not isinstance(message := line.recv(), Check):
                    pass
                line.send(Checked(id=message.work.id))
                line.recv()

    async def ask() -> None:
        async with _serving(tmp_path, Dying()) as (server, client):
            kept = asyncio.create_task(client.post("/v1/jobs", json=_job()))
            assert (await kept).status_code == 202
            reply = await client.post("/v1/images/generations", json={"prompt": "a red circle"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_unavailable")
            assert [job.status for job in server.jobs.values()] == ["queued"]  # for which nobody waits

    asyncio.run(ask())


def test_everybody_who_waits_is_let_in_at_once() -> None:
    async def wait() -> None:
        arrivals, found = Arrivals(), list[str]()
        waiting = [asyncio.create_task(arrivals.wait(lambda: found[0] if found else None, 30)) for _ in range(3)]
        await _until(lambda: arrivals.num == 3)
        arrivals.note()
        await asyncio.sleep(0)
        found.append("ranks")
        arrivals.note()
        assert await asyncio.gather(*waiting) == ["ranks"] * 3
        assert arrivals.num == 0
        with pytest.raises(TimeoutError):
            await arrivals.wait(lambda: None, 0.01)

    asyncio.run(wait())
