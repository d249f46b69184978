"""Checks which jobs begin anew when a server or its ranks have ended, with ranks that are threads of this process.

The same with real servers, whose processes are killed, runs with ``--full``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client
from pathlib import Path

import pytest

from partsong.errors import DistributedError, OutputError
from partsong.serving.catalog import picture_model
from partsong.serving.errors import ApiError
from partsong.serving.jobs import Job, Status
from partsong.serving.journal import JobJournal
from partsong.serving.messages import Check, Checked, JobFinished, JobStarted, JobWork, Ready, Stop, Submit
from partsong.serving.ranks.settings import ReplicaSettings
from partsong.serving.runners import RankRunner
from partsong.serving.server import Server
from partsong.serving.suspects import Suspects


class Ranks:
    """Stands for the ranks of a server, of which one ends with the first job, for so many times."""

    def __init__(self, deaths: int = 0) -> None:
        self.deaths, self.made = deaths, list[JobWork]()
        self.jobs: dict[str, Job] = {}
        self.may_die = threading.Event()
        self.may_die.set()

    def run(self, settings: ReplicaSettings, nproc: int, closing: threading.Event) -> None:
        pause = threading.Event()
        # A server that closes may hang up instead of saying so.
        with Client(settings.address, authkey=settings.authkey) as line, contextlib.suppress(EOFError):
            line.send(Ready(strategies=(), defaults={}, kind="image"))
            while not isinstance(message := line.recv(), Stop):
                if isinstance(message, Check):
                    line.send(Checked(id=message.work.id, kind="exact"))
                if not isinstance(message, Submit):
                    continue
                line.send(JobStarted(message.work.id))
                if self.deaths and message.work.id == "image_0":
                    # A death before the server has heard that the job is at work would cost the job nothing.
                    while self.jobs[message.work.id].status != "in_progress":
                        pause.wait(0.005)
                    self.may_die.wait(30)
                    self.deaths -= 1
                    raise DistributedError("rank 0 was killed by SIGKILL")
                self.made.append(message.work)
                line.send(JobFinished(id=message.work.id, spent=(), seconds=1.0))


def _left_behind(folder: Path, states: Sequence[Status]) -> None:
    """Writes what a server leaves behind that ends with jobs in some states."""
    journal = JobJournal(folder / "jobs.sqlite")
    for number, status in enumerate(states):
        request = {"prompt": "a red circle", "n": 1, "seed": number, "width": 64, "height": 64}
        journal.write(
            Job(id=f"image_{number}", kind="image", model="shapes", request=request, status=status, created_at=number)
        )
    journal.close()


def _served(
    folder: Path,
    ranks: Ranks,
    replicas: int = 1,
    name: str = "shapes",
    meanwhile: Callable[[Server], None] = lambda server: None,
) -> list[Job]:
    """Serves until all jobs have ended, and does something once the first is at work; returns the jobs."""

    async def serve() -> list[Job]:
        model = picture_model(name, nproc=1, strategies=(), loras={})
        server = Server(
            models=(model,), folder=folder, runner=RankRunner(run=ranks.run, host="127.0.0.1"), num_replicas=replicas
        )
        ranks.jobs = server.jobs
        server.open()
        await server.start()
        try:
            async with asyncio.timeout(30):
                while next(iter(server.jobs.values())).status == "queued":
                    await asyncio.sleep(0.005)
            meanwhile(server)
            for job in (jobs := list(server.jobs.values())):
                async with asyncio.timeout(30):
                    async for _ in server.watchers.changes(job, 0.1):
                        pass
            return jobs
        finally:
            await server.close()

    return asyncio.run(serve())


def test_a_server_takes_up_what_the_last_one_left_behind(tmp_path: Path) -> None:
    _left_behind(tmp_path, ("completed", "in_progress", "queued"))
    ranks = Ranks()
    done, begun, waited = _served(tmp_path, ranks)
    assert [work.id for work in ranks.made] == ["image_1", "image_2"]
    assert {job.status for job in (done, begun, waited)} == {"completed"}
    assert done.note is None
    assert "from its first step after the server ended; it began then" in str(begun.note)
    assert "it waited for its turn then" in str(waited.note)


def test_a_job_of_a_model_that_is_not_served_any_more_fails(tmp_path: Path) -> None:
    _left_behind(tmp_path, ("queued",))
    (job,) = _served(tmp_path, Ranks(), name="shapes-unet")
    assert job.status == "failed"
    assert job.error == {"code": "model_gone", "message": "shapes is not served any more"}


@pytest.mark.parametrize(
    ("replicas", "deaths", "status"), [(2, 2, "completed"), (2, 3, "failed"), (1, 1, "completed"), (1, 3, "failed")]
)
def test_a_job_whose_ranks_died_goes_to_others_until_it_killed_three(
    tmp_path: Path, replicas: int, deaths: int, status: str
) -> None:
    _left_behind(tmp_path, ("queued", "queued"))
    ranks = Ranks(deaths)
    job, other = _served(tmp_path, ranks, replicas)
    assert (job.status, job.losses, other.status, other.losses) == (status, deaths, "completed", 0)
    made = ["image_0", "image_1"] if status == "completed" else ["image_1"]
    assert sorted(work.id for work in ranks.made) == made
    if status == "completed":
        assert "after the ranks that made it ended: rank 0 was killed" in str(job.note)
    else:
        assert job.error == {"code": "ranks_ended", "message": "rank 0 was killed by SIGKILL"}


def test_a_job_that_was_cancelled_as_its_ranks_died_is_not_made(tmp_path: Path) -> None:
    _left_behind(tmp_path, ("queued", "queued"))
    ranks = Ranks(deaths=1)
    ranks.may_die.clear()

    def cancel(server: Server) -> None:
        server.cancel(server.jobs["image_1"])  # of which the ranks hear nothing any more
        assert server.jobs["image_1"].status == "queued"
        ranks.may_die.set()

    job, cancelled = _served(tmp_path, ranks, meanwhile=cancel)
    assert (job.status, cancelled.status, [work.id for work in ranks.made]) == ("completed", "cancelled", ["image_0"])


def test_jobs_that_lost_their_ranks_are_tried_one_at_a_time() -> None:
    given: list[str] = []
    suspects = Suspects(lambda work: given.append(work.id))
    for name in "abc":
        suspects.add(JobWork(id=name, prompt="", arguments={}, out=()))
    suspects.try_next()
    suspects.try_next()
    assert given == ["a"]
    suspects.end("b")  # cancelled while it waits
    suspects.add(JobWork(id="a", prompt="", arguments={}, out=()))  # it has lost its ranks once more
    suspects.try_next()
    assert given == ["a", "c"]
    suspects.end("c")
    suspects.try_next()
    assert given == ["a", "c", "a"]


def test_ranks_that_have_come_back_get_one_suspect_at_a_time(tmp_path: Path) -> None:
    _left_behind(tmp_path, ("queued", "queued", "queued"))
    given: list[list[str]] = []

    class Dying(Ranks):
        """Takes all jobs before it works on one, and dies with them the first time."""

        def run(self, settings: ReplicaSettings, nproc: int, closing: threading.Event) -> None:
            with Client(settings.address, authkey=settings.authkey) as line, contextlib.suppress(EOFError):
                line.send(Ready(strategies=(), defaults={}, kind="image"))
                taken: list[str] = []
                given.append(taken)
                while not isinstance(message := line.recv(), Stop):
                    if not isinstance(message, Submit):
                        continue
                    taken.append(message.work.id)
                    line.send(JobStarted(message.work.id))
                    if len(given) > 1:
                        assert not line.poll(0.2), "another one came before this one had ended"
                        line.send(JobFinished(id=message.work.id, spent=(), seconds=1.0))
                    elif len(taken) == 3:
                        pause = threading.Event()
                        while any(self.jobs[name].status != "in_progress" for name in taken):
                            pause.wait(0.005)
                        raise DistributedError("rank 0 was killed by SIGKILL")

    jobs = _served(tmp_path, Dying())
    assert [(job.status, job.losses) for job in jobs] == [("completed", 1)] * 3
    assert [sorted(taken) for taken in given] == [["image_0", "image_1", "image_2"]] * 2


def test_a_full_disk_refuses_jobs_until_there_is_room(tmp_path: Path) -> None:
    _left_behind(tmp_path, ("queued",))
    pages, said = "PRAGMA max_page_count", list[str]()

    async def ask(server: Server) -> Job | str:
        try:
            return await server.submit(server.models[0], {"prompt": "x" * 20_000, "seed": 1})
        except OutputError as error:
            return str(error)

    async def serve() -> None:
        model = picture_model("shapes", nproc=1, strategies=(), loras={})
        ranks = Ranks()
        server = Server(models=(model,), folder=tmp_path, runner=RankRunner(run=ranks.run, host="127.0.0.1"))
        ranks.jobs = server.jobs
        server.open()
        await server.start()
        try:
            async with asyncio.timeout(30):
                while any(not job.has_ended for job in server.jobs.values()):
                    await asyncio.sleep(0.005)
            server.journal._database.execute(f"{pages} = 1")  # the least that sqlite takes is what there is
            for _ in range(5):
                said.append(str(await ask(server)))
            assert list(server.jobs) == ["image_0"]
            server.save(server.jobs["image_0"])  # a change of a job that is known is kept for later
            server.journal._database.execute(f"{pages} = 1000000")
            job = await ask(server)
            assert isinstance(job, Job)
            async with asyncio.timeout(30):
                async for _ in server.watchers.changes(job, 0.1):
                    pass
            assert job.status == "completed"
        finally:
            await server.close()

    asyncio.run(serve())
    assert all("cannot be written" in line and "full" in line for line in said)


def test_a_server_that_ends_takes_no_more_and_finishes_what_runs(tmp_path: Path) -> None:
    _left_behind(tmp_path, ("queued", "queued"))
    ranks, seen = Ranks(deaths=1), list[BaseException | None]()
    ranks.may_die.clear()

    def leave(server: Server) -> None:
        server.leave(60.0)
        running, waiting = server.jobs["image_0"], server.jobs["image_1"]
        assert not server.leaves(running)
        assert server.leaves(waiting)
        try:
            asyncio.get_running_loop().create_task(server.submit(server.models[0], {"prompt": "a"})).add_done_callback(
                lambda task: seen.append(task.exception())
            )
        finally:
            ranks.may_die.set()

    job, _ = _served(tmp_path, ranks, meanwhile=leave)
    assert job.status == "completed"
    assert isinstance(seen[0], ApiError) and seen[0].status == 503
    assert seen[0].headers["Retry-After"] == "5"
