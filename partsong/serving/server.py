"""Holds a server's models, jobs and files, and brings them together; it knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partsong.errors import OutputError, PartsongError
from partsong.seeds import check_seed
from partsong.serving.access.users import OPERATOR, User, Users
from partsong.serving.answers.response_store import ResponseStore
from partsong.serving.denoising.sessions import DenoiseSessions
from partsong.serving.errors import ApiError, leaving
from partsong.serving.expiry import sweep
from partsong.serving.job_progress import JobProgress
from partsong.serving.jobs import Job, Watchers
from partsong.serving.journal import JobJournal
from partsong.serving.limits import Limits
from partsong.serving.messages import FromRanks, JobWork
from partsong.serving.metrics import Metrics
from partsong.serving.operating.chores import Chores
from partsong.serving.operating.measuring import MachineMeasurement
from partsong.serving.operating.outputs import DailyOutputs
from partsong.serving.replica import StartTrouble
from partsong.serving.replicas import Replicas
from partsong.serving.runners import LOCAL, RankRunner
from partsong.serving.served_names import ServedNames
from partsong.serving.services import SERIAL, PictureService, find_model, work_of
from partsong.serving.suspects import Suspects
from partsong.serving.waiting_room import WaitingRoom

if TYPE_CHECKING:
    from partsong.reasoning.scorers.verifier import VerifierAddress
    from partsong.serving.texts.served import ServedText

__all__ = ["Server"]

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Server:
    """Takes jobs, gives them to replicas, and keeps their results.

    Attributes:
        models: of pictures and videos.
        texts: models of text, by name.
        upstream: address of another server whose models are served too; None for none.
        verifier: scores the texts of those, for thinking methods that take a scorer; None leaves them their own.
        served_names: further names by which clients may ask for models.
        folder: for files and the journal.
        limits: what one request may ask for.
        users: who may use it.
        runner: runs the ranks.
        num_replicas: replicas of each model of pictures and videos.
        jobs: by name, the oldest first.
        replicas: by the name of their model; filled when the server starts.
        rooms: where requests wait for them, by the same names.
        watchers: of the jobs.
        metrics: of the server.
        outputs: further folder of what is made; None for none.
        responses: those of text models that later ones can follow.
        leaves_at: when jobs that still run are left to the next server, by `time.monotonic`; None while it serves.
    """

    models: Sequence[PictureService]
    texts: dict[str, ServedText] = field(default_factory=dict)
    upstream: str | None = None
    verifier: VerifierAddress | None = None
    served_names: ServedNames = field(default_factory=ServedNames)
    folder: Path
    limits: Limits = field(default_factory=Limits)
    users: Users = field(default_factory=Users)
    runner: RankRunner = LOCAL
    num_replicas: int = 1
    jobs: dict[str, Job] = field(default_factory=dict)
    replicas: dict[str, Replicas] = field(default_factory=dict)
    rooms: dict[str, WaitingRoom] = field(default_factory=dict)
    watchers: Watchers = field(default_factory=Watchers)
    metrics: Metrics = field(default_factory=Metrics)
    outputs: DailyOutputs | None = None
    responses: ResponseStore = field(default_factory=ResponseStore)

    leaves_at: float | None = None

    def __post_init__(self) -> None:
        self.sessions, self.measuring, self.chores = DenoiseSessions(self), MachineMeasurement(self), Chores()

    def leave(self, grace: float) -> None:
        """Takes no further jobs, and gives those that run some time; those that wait are left to the next server."""
        if self.leaves_at is None:
            self.leaves_at = time.monotonic() + grace
        for room in self.rooms.values():
            room.note()

    def leaves(self, job: Job) -> bool:
        """Says whether a job is left to the next server with this folder."""
        return self.leaves_at is not None and (job.status == "queued" or time.monotonic() > self.leaves_at)

    def hindrance(self, job: Job) -> ApiError | None:
        """Returns why a client should not wait for a job any longer; None where it should."""
        if self.leaves(job):
            return leaving()
        return self.rooms[job.model].hindrance if job.status == "queued" else None

    @property
    def troubles(self) -> dict[str, StartTrouble]:
        """Returns what is known of models whose ranks cannot be started, by their names."""
        every = {name: replicas.trouble for name, replicas in self.replicas.items()}
        return {name: trouble for name, trouble in every.items() if trouble is not None}

    async def _finish_running(self) -> None:
        running = [job for job in self.jobs.values() if job.status == "in_progress"]
        for job in running if self.leaves_at is not None else ():
            async for _ in self.watchers.changes(job, 0.2):
                if self.leaves(job):
                    break

    def open(self) -> None:
        """Opens the folder and its journal, which only this user may read; before `start`.

        Raises:
            OutputError: the folder cannot be written, or is another server's.
        """
        self.journal = JobJournal(self.folder / "jobs.sqlite")
        (self.folder / "files").mkdir(exist_ok=True)
        (self.folder / "files").chmod(0o700)
        for path in self.folder.glob("jobs.sqlite*"):
            path.chmod(0o600)

    async def start(self) -> None:
        """Resumes unfinished jobs, and starts all replicas."""
        self._progress = JobProgress(self)
        self.unwritten: set[str] = set()  # jobs whose last change the journal does not know
        self.created = int(time.time())
        for job in self.journal.read():
            self.jobs[job.id] = job
            if not job.has_ended:
                self._take_up(job)
        for model in self.models:
            replicas = Replicas(model, self.runner, self.num_replicas, on_message=self._take, on_lost=self._lost)
            self.replicas[model.name] = replicas
            self._progress.suspects[model.name] = Suspects(replicas.submit)
            self.rooms[model.name] = WaitingRoom(replicas, self.limits, lambda: self.leaves_at is not None)
            self.metrics.replicas.labels(model.name).set_function(partial(attrgetter("num_ready"), replicas))
            replicas.start()
        await self._start_texts()
        self._sweeper = asyncio.create_task(sweep(self))

    def restart(self) -> None:
        """Begins to restart the ranks of pictures and videos, one replica of a model after the other.

        Raises:
            ApiError: another program has started them.
        """
        if not self.runner.starts_again:
            raise ApiError(409, "torchrun has started the ranks; end the server, and torchrun starts all of them again")
        for replicas in self.replicas.values():
            self.chores.begin(replicas.restart())

    async def close(self) -> None:
        """Ends all replicas, after the grace of `leave`; other jobs are resumed by the next server with this folder."""
        await self._finish_running()
        self._sweeper.cancel()
        self.sessions.end_all()
        self.chores.cancel()
        for task in self._starts.values():
            task.cancel()
        await asyncio.gather(*(each.close() for each in (*self.replicas.values(), *self.texts.values())))
        if self._other is not None:
            await self._other.close()
        self.journal.close()

    def _take(self, replicas: Replicas, message: FromRanks) -> None:
        if not self.sessions.take(message):
            self._progress.take(replicas, message)

    def _lost(self, replicas: Replicas, begun: Mapping[str, JobWork], error: PartsongError) -> None:
        self._progress.lost(replicas, self.sessions.lost(begun, error), error)

    async def _start_texts(self) -> None:
        from partsong.serving.texts.upstream import Upstream, UpstreamText

        self._other = None if self.upstream is None else Upstream(self.upstream)
        if self._other is not None:
            for name in await self._other.models():
                self.texts.setdefault(name, UpstreamText(name, self._other, verifier=self.verifier))
        self.served_names.check([model.name for model in self.models], self.texts)
        # Nobody waits for them here: pictures can be served while a model of text is loaded.
        self._starts = {name: asyncio.create_task(text.start()) for name, text in self.texts.items()}

    @property
    def missing(self) -> list[str]:
        """Says which models are not ready, and why."""
        lines = []
        for name, replicas in self.replicas.items():
            if not replicas.num_ready:
                lines.append(f"{name}: {replicas.trouble or 'its ranks are starting, or do not answer'}")
        for name, text in self.texts.items():
            if not text.ready:
                start = self._starts[name]
                error = start.exception() if start.done() and not start.cancelled() else None
                lines.append(f"{name}: {error or 'its process is starting'}")
        return lines

    def model(self, name: str | None, kind: str) -> PictureService:
        """Returns a model by name; without one, the first of the kind; see `find_model`."""
        return find_model(self.models, self.served_names.target(name), kind)

    async def submit(
        self,
        model: PictureService,
        request: Mapping[str, Any],
        *,
        user: User = OPERATOR,
        twin_of: str | None = None,
        **more: Any,
    ) -> Job:
        """Takes a job.

        Args:
            model: what makes it.
            request: by the names of `Job.request`.
            user: who asks.
            twin_of: the job whose serial twin it is.
            **more: fields of `JobWork` that are no part of the request, such as the number of previews.

        Raises:
            ApiError: it asks for too much, the queue is full, or the ranks are not there.
            PartsongError: the ranks refuse it.
        """
        if self.leaves_at is not None:
            raise leaving()
        room = self.rooms[model.name]
        facts = await room.facts()
        strategies, advice = model.strategies(request.get("strategy"))
        # A client that names no seed wants another picture each time; the job says which seed it was.
        asked = {**request, "seed": check_seed(request.get("seed", secrets.randbelow(2**32)))}
        job = Job(
            id=f"{model.kind}_{secrets.token_hex(12)}",
            kind="video" if model.kind == "video" else "image",
            model=model.name,
            request=asked,
            strategy="+".join(strategies) or SERIAL,
            advice=advice,
            twin_of=twin_of,
            user=user.name,
        )
        work = work_of(job, self.file, facts.defaults, strategies, **more)
        self._check_room(model, user)
        checked = await room.check(work)
        if checked.error is not None:
            raise checked.error
        self._check_room(model, user)  # more jobs have arrived while the ranks were asked
        job.exactness = checked.kind
        job.steps = int(work.arguments.get("num_inference_steps", 0))
        self._add(job, work)
        return job

    def _check_room(self, model: PictureService, user: User) -> None:
        self.limits.check_queue(self.jobs.values(), model.name)
        user.check_jobs(self.jobs.values())

    def cancel(self, job: Job) -> None:
        """Drops a job wherever it stands; one that has ended stays as it is."""
        if not job.has_ended and job.id not in self._progress.comparing:
            self.replicas[job.model].cancel(job.id)

    async def drop(self, job: Job) -> None:
        """Drops a job and waits until it has ended."""
        self.cancel(job)
        async for _ in self.watchers.changes(job, 1.0):
            pass

    def position(self, job: Job) -> int:
        """Returns how many jobs of the same model wait before a job, itself included; 0 once it is running."""
        waiting = (each for each in self.jobs.values() if each.model == job.model and each.status == "queued")
        return 0 if job.status != "queued" else 1 + sum(each.created_at < job.created_at for each in waiting)

    def file(self, name: str) -> Path:
        """Returns the path of a file of a job."""
        return self.folder / "files" / name

    def save(self, job: Job) -> None:
        """Writes a job to the journal, later if the disk is full, and wakes up everybody who waits for it."""
        self.write(job)
        self.watchers.change(job.id)

    def write(self, job: Job) -> None:
        """Writes a job to the journal, later if the disk is full."""
        try:
            self.journal.write(job)
            self.unwritten.discard(job.id)
        except OutputError as error:
            if not self.unwritten:
                _log.error("%s", error)
            self.unwritten.add(job.id)

    def _add(self, job: Job, work: JobWork) -> None:
        self.journal.write(job)  # first: a job that the journal does not know would be lost with the server
        self.jobs[job.id] = job
        self.watchers.change(job.id)
        self.replicas[job.model].submit(work)
        self._progress.count(job.model)

    def _take_up(self, job: Job) -> None:
        """Restarts a job that the last server left behind."""
        was = "began" if job.status == "in_progress" else "waited for its turn"
        job.begin_anew(f"after the server ended; it {was} then")
        if all(model.name != job.model for model in self.models):
            self._progress.end(job, "failed", code="model_gone", message=f"{job.model} is not served any more")
