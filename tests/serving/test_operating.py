"""Checks what operators ask for: restarts without a refused job, the state of a server, and folders of days."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from datetime import date
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import httpx
import pytest

from partsong.cli import serve_check
from partsong.cli.serving_options import ServeCheck
from partsong.errors import ArgumentError, DistributedError
from partsong.serving.access.users import OPERATOR, User, Users
from partsong.serving.app import build_app
from partsong.serving.catalog import picture_model
from partsong.serving.errors import ApiError
from partsong.serving.jobs import Job
from partsong.serving.messages import (
    Check,
    Checked,
    JobFinished,
    JobReturned,
    JobStarted,
    Pulse,
    Ready,
    Recall,
    Stop,
    Submit,
)
from partsong.serving.operating.outputs import DailyOutputs
from partsong.serving.ranks.settings import ReplicaSettings
from partsong.serving.runners import RankRunner
from partsong.serving.server import Server
from tests.serving.running import running


class Ranks:
    """Stands for ranks that take one job after the other, and remembers each start and end."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def run(self, settings: ReplicaSettings, nproc: int, closing: threading.Event) -> None:
        self.events.append("start")
        with Client(settings.address, authkey=settings.authkey) as line, contextlib.suppress(EOFError):
            line.send(Ready(strategies=(), defaults={}, kind="image"))
            line.send(Pulse(1234))
            while not isinstance(message := line.recv(), Stop):
                if isinstance(message, Check):
                    line.send(Checked(id=message.work.id))
                elif isinstance(message, Recall):
                    line.send(JobReturned(message.id))
                elif isinstance(message, Submit):
                    line.send(JobStarted(message.work.id))
                    line.send(JobFinished(id=message.work.id, spent=(), seconds=1.0))
        self.events.append("end")


@contextlib.asynccontextmanager
async def _serving(folder: Path, ranks: Ranks, replicas: int) -> AsyncIterator[Server]:
    model = picture_model("shapes", nproc=1, strategies=(), loras={})
    runner = RankRunner(run=ranks.run, host="127.0.0.1")
    server = Server(models=(model,), folder=folder, runner=runner, num_replicas=replicas)
    server.open()
    await server.start()
    try:
        async with asyncio.timeout(60):
            while server.replicas["shapes"].num_ready < replicas:
                await asyncio.sleep(0.005)
            yield server
    finally:
        await server.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_restart_without_a_refused_job(tmp_path: Path, replicas: int) -> None:
    ranks = Ranks()

    async def serve() -> list[Job]:
        async with _serving(tmp_path, ranks, replicas) as server:
            server.restart()
            jobs = []
            while ranks.events.count("start") < 2 * replicas or server.replicas["shapes"].num_ready < replicas:
                jobs.append(await server.submit(server.models[0], {"prompt": "p", "seed": 0}))
                async for _ in server.watchers.changes(jobs[-1], 0.1):
                    pass
            return jobs

    jobs = asyncio.run(serve())
    assert {job.status for job in jobs} == {"completed"}
    assert {job.losses for job in jobs} == {0}
    assert ranks.events[: 3 * replicas] == [*["start"] * replicas, *["end", "start"] * replicas], "one after the other"


def test_ranks_of_another_program_are_not_restarted(tmp_path: Path) -> None:
    server = Server(models=(), folder=tmp_path, runner=RankRunner(run=Ranks().run, starts_again=False))
    with pytest.raises(ApiError, match="torchrun has started the ranks"):
        server.restart()


def test_ranks_that_end_before_they_are_restarted_are_new_and_stay(tmp_path: Path) -> None:
    """The job that a restart waits for takes its ranks along."""
    begun, may_end = threading.Event(), threading.Event()

    class Ending(Ranks):
        def run(self, settings: ReplicaSettings, nproc: int, closing: threading.Event) -> None:
            if self.events:
                super().run(settings, nproc, closing)
                return
            self.events.append("start")
            with Client(settings.address, authkey=settings.authkey) as line:
                line.send(Ready(strategies=(), defaults={}, kind="image"))
                while not isinstance(message := line.recv(), Submit):
                    line.send(Checked(id=message.work.id))
                line.send(JobStarted(message.work.id))
                begun.set()
                may_end.wait(30)
                raise DistributedError("rank 0 was killed by SIGKILL")

    ranks = Ending()

    async def serve() -> Job:
        async with _serving(tmp_path, ranks, 1) as server:
            job = await server.submit(server.models[0], {"prompt": "p", "seed": 0})
            while job.status != "in_progress":
                await asyncio.sleep(0.005)
            restarting = asyncio.create_task(server.replicas["shapes"].restart())
            await asyncio.sleep(0)
            may_end.set()
            await restarting
            async for _ in server.watchers.changes(job, 0.1):
                pass
            assert ranks.events == ["start", "start"], "the new ranks were not restarted"
            return job

    assert asyncio.run(serve()).status == "completed"


def test_an_operator_sees_how_the_server_is(tmp_path: Path) -> None:
    async def serve() -> dict[str, Any]:
        async with _serving(tmp_path, Ranks(), 1) as server:
            server.jobs["image_1"] = Job(
                id="image_1", kind="image", model="shapes", request={}, user="ada", status="failed", seconds=2.0,
                error={"code": "refused", "message": "it is too large"},
            )  # fmt: skip
            transport = httpx.ASGITransport(build_app(server))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                while not (state := (await client.get("/v1/operator")).json())["models"][0]["replicas"][0]["memory"]:
                    await asyncio.sleep(0.005)
                return state

    state = asyncio.run(serve())
    (model,) = state["models"]
    assert (model["id"], model["kind"], model["ready"], model["waiting"], model["running"]) == (
        "shapes", "image", True, 0, 0,
    )  # fmt: skip
    assert model["replicas"] == [{"ready": True, "jobs": 0, "memory": 1234}]
    assert state["users"] == [{"name": "ada", "jobs": 1, "unfinished": 0, "seconds": 2.0}]
    assert [(error["job"], error["user"], error["message"]) for error in state["errors"]] == [
        ("image_1", "ada", "it is too large")
    ]
    assert 0 < state["disk"]["free"] <= state["disk"]["total"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/operator"),
        ("POST", "/v1/operator/restart"),
        ("POST", "/v1/operator/calibrate"),
        ("GET", "/metrics"),
    ],
)
def test_users_are_no_operators(tmp_path: Path, method: str, path: str) -> None:
    users = {"key-of-ada-0123456789": User(name="ada"), "key-of-the-operator-01": OPERATOR}
    server = Server(models=(), folder=tmp_path, users=Users(users))
    server.created, server.unwritten = 0, set()

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(build_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            replies = [await client.request(method, path, headers={"Authorization": f"Bearer {key}"}) for key in users]
            return [reply.status_code for reply in replies]

    assert asyncio.run(ask()) == [403, 202 if method == "POST" else 200]


def test_what_is_made_is_kept_by_days(tmp_path: Path) -> None:
    files = [tmp_path / f"image_00000000000000000000abcdef-{number}.png" for number in range(2)]
    for path in files:
        path.write_bytes(path.name.encode())
    outputs = DailyOutputs(tmp_path / "kept", days=2)
    job = Job(id="image_00000000000000000000abcdef", kind="image", model="shapes", request={"prompt": "p", "seed": 3})
    job.completed_at = 1e9
    outputs.keep(job, files)
    (day,) = (tmp_path / "kept").iterdir()
    assert day.name == date.fromtimestamp(1e9).isoformat()
    kept = sorted(day.iterdir())
    assert [path.name[6:] for path in kept] == [
        "-shapes-abcdef-0.png", "-shapes-abcdef-1.png", "-shapes-abcdef.json",
    ]  # fmt: skip
    assert kept[0].read_bytes() == files[0].name.encode()
    assert json.loads(kept[2].read_text())["seed"] == 3
    today = date.fromtimestamp(1e9)
    for name in ("notes", today.replace(day=today.day - 1).isoformat(), today.replace(day=today.day - 2).isoformat()):
        (tmp_path / "kept" / name).mkdir()
    outputs.remove_old(today)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        today.replace(day=today.day - 1).isoformat(), today.isoformat(), "notes",
    ]  # fmt: skip


def test_a_folder_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kept").write_text("a file")
    DailyOutputs(tmp_path / "kept").keep(Job(id="image_1", kind="image", model="m", request={}), [])
    assert "what job image_1 made cannot be kept" in caplog.text


def test_a_check_of_no_server_says_so() -> None:
    with pytest.raises(ArgumentError, match="write an address"):
        serve_check.check(ServeCheck(url="localhost:8000"))
    with pytest.raises(DistributedError, match="/health does not answer"):
        serve_check.check(ServeCheck(url="http://127.0.0.1:9"))


def test_a_check_of_another_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_check._Server, "ask", lambda *asked: {"up": True})
    with pytest.raises(DistributedError, match="answers health in another form; is it a partsong server"):
        serve_check.check(ServeCheck(url="http://127.0.0.1:9"))


def test_a_machine_is_measured_only_where_nothing_disturbs_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with _serving(tmp_path, Ranks(), 1) as server:
            with pytest.raises(ApiError, match="the ranks are started elsewhere"):
                server.measuring.begin()
            server.runner = RankRunner(run=server.runner.run)
            server.jobs["a"] = Job(id="a", kind="image", model="shapes", request={"prompt": "a"})
            with pytest.raises(ApiError, match="would disturb the measurement"):
                server.measuring.begin()
            server.measuring.is_running = True
            with pytest.raises(ApiError, match="is being measured already"):
                server.measuring.begin()

    asyncio.run(main())


@pytest.mark.full
def test_after_a_measurement_the_planner_chooses(tmp_path: Path) -> None:
    kept = {"PARTSONG_CALIBRATIONS": str(tmp_path / "calibrations")}
    with running(tmp_path, "--model", "shapes", "--nproc", "2", environment=kept) as server:

        def advice() -> str:
            body = {"kind": "image", "prompt": "a red circle", "num_inference_steps": 1}
            name = httpx.post(f"{server.url}/v1/jobs", json=body, timeout=60).json()["id"]
            server.wait(lambda: server.json(f"/v1/jobs/{name}")["status"] == "completed")
            return server.json(f"/v1/jobs/{name}")["advice"]

        assert "this machine was not measured" in advice()
        assert httpx.post(f"{server.url}/v1/operator/calibrate").status_code == 202
        server.wait(lambda: not server.json("/v1/operator")["measuring"], 180.0)
        state = server.json("/v1/operator")
        assert (state["measured"], state["measure_fault"]) == (True, None)
        assert "not measured" not in advice()
