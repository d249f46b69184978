"""Checks that the event loop waits for nothing slow: other clients would wait with it, and so would /health."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import imageio.v3
import numpy as np
import pytest
from PIL import Image

from partsong.serving.app import build_app
from partsong.serving.errors import ApiError
from partsong.serving.job_progress import JobProgress
from partsong.serving.jobs import Job
from partsong.serving.journal import JobJournal
from partsong.serving.limits import Limits
from partsong.serving.messages import Check, JobFinished, JobWork, Stop
from partsong.serving.server import Server
from partsong.videos import save_video
from tests.serving.taker import Taker, png, service
from tests.serving.test_replica import Heard, _replica


def _threads_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Returns a list that gets the thread of every call of a function, which does its work as before."""
    threads, real = list[int](), getattr(owner, name)

    def note(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, note)
    return threads


def test_ranks_that_read_late_keep_nobody_waiting() -> None:
    """The line to them holds some 200 kB, and the loop asks for more than that before they read."""
    asked = threading.Event()
    seen: list[Any] = []

    def say(line: Any) -> None:
        seen.append(asked.wait(5.0))
        while not isinstance(message := line.recv(), Stop):
            seen.append(message.work.prompt[:1])

    async def follow() -> None:
        heard = Heard()
        replica = _replica(heard, say, host=None)
        replica.start()
        await heard.until(lambda: len(heard.messages) == 1)
        for number in range(5):
            work = JobWork(id=f"a{number}", prompt=f"{number}" * 200_000, arguments={}, out=())
            assert replica.send(Check(work))
        asked.set()
        await replica.close()

    asyncio.run(follow())
    assert seen == [True, *"01234"]


def test_a_change_in_the_journal_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    journal = JobJournal(tmp_path / "jobs.sqlite")
    mode = [journal._database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert mode == ["wal", 1]  # 1 is NORMAL: the disk is waited for once in about a thousand changes
    journal.close()


def test_pictures_are_read_and_written_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Taker(models=[service("one", "image")], folder=tmp_path)
    server.prepare()
    server.watchers = SimpleNamespace(changes=_none, change=lambda name: None)  # type: ignore[assignment]
    server.cancel = lambda job: None  # type: ignore[method-assign]
    converted = _threads_of(monkeypatch, Image.Image, "convert")

    async def edit() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            form = {"model": "one", "prompt": "go", "output_format": "jpeg"}
            files = [("image", ("a.png", png("red"))), ("mask", ("b.png", png("blue")))]
            return await client.post("/v1/images/edits", data=form, files=files)

    assert asyncio.run(edit()).json()["data"][0]["b64_json"].startswith("/9j/")
    assert len(converted) == 3  # a picture, a mask, and what was made of them
    assert threading.get_ident() not in converted


def test_what_is_loaded_is_not_looked_through_for_garbage(tmp_path: Path) -> None:
    code = f"""
import gc, pathlib
from partsong.serving import web
from partsong.serving.server import Server
web._Web.run = lambda web, sockets: print(len(gc.get_objects()))
web.run_server(Server(models=(), folder=pathlib.Path({str(tmp_path)!r})), web.WebSettings(host="127.0.0.1", port=0))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(ran.stdout) < 1000  # of some 80,000


async def _none(job: Job, patience: float) -> Any:
    return
    yield


def test_a_video_is_looked_at_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = _threads_of(monkeypatch, imageio.v3, "improps")
    server = Server(models=(), folder=tmp_path)
    server.open()
    job = Job(id="video_0", kind="video", model="m", request={"width": 33, "height": 21}, status="in_progress")
    server.jobs[job.id] = job
    save_video([np.zeros((21, 33, 3), np.uint8)], server.file("video_0.mp4"))

    async def finish() -> None:
        server.unwritten, progress = set(), JobProgress(server)
        progress.take(SimpleNamespace(name="m"), JobFinished(id=job.id, spent=(), seconds=1.0))  # type: ignore[arg-type]
        async for _ in server.watchers.changes(job, 20.0):
            pass

    asyncio.run(finish())
    assert (job.status, job.made_size, len(looked)) == ("completed", "34x22", 1)
    assert threading.get_ident() not in looked
    server.journal.close()


@pytest.mark.parametrize(("done", "latest"), [(0, 10.0), (1, 30.0), (40, 16.0)])
def test_refused_clients_come_back_at_different_times(done: int, latest: float) -> None:
    """Jobs take a second, and one ends every quarter of a second, since they share the ranks."""
    jobs = [Job(id=f"{n}", kind="image", model="m", request={}) for n in range(done + 64)]
    for number, job in enumerate(jobs[:done]):
        job.status, job.seconds, job.completed_at = "completed", 1.0, time.time() + number / 4
    waits = list[float]()
    for _ in range(300):
        with pytest.raises(ApiError) as refused:
            Limits(waiting=64).check_queue(jobs, "m")
        waits.append(refused.value.retry_after or 0.0)
    assert latest / 2 <= min(waits) < 0.6 * latest
    assert 0.9 * latest < max(waits) <= latest
