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
from partsong.serving.answers.response_store import ResponseStore
from partsong.serving.errors import ApiError, as_api_error, leaving
from partsong.serving.expiry import sweep
from partsong.serving.files.made_sizes import note_size
from partsong.serving.jobs import Job, Watchers
from partsong.serving.journal import JobJournal
from partsong.serving.limits import Limits
from partsong.serving.messages import (
    FromRanks,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobStarted,
    JobStepped,
    JobWork,
    Pulse,
    Ready,
)
from partsong.serving.metrics import Metrics, labels_of
from partsong.serving.replica import StartTrouble
from partsong.serving.replicas import Replicas
from partsong.serving.runners import LOCAL, RankRunner
from partsong.serving.served_names import ServedNames
from partsong.serving.services import SERIAL, PictureService, files_of, find_model, work_of
from partsong.serving.suspects import Suspects
from partsong.serving.twins import note_difference
from partsong.serving.waiting_room import WaitingRoom

if TYPE_CHECKING:
    from partsong.serving.texts.served import ServedText

__all__ = ["Server"]

_log = logging.getLogger(__name__)

#: How often the ranks of a job may die before it fails: it may be what kills them. After the first time it is made
#: beside no other job that has lost its ranks, so that such a one takes no others with it.
_TRIES = 3


@dataclass(kw_only=True)
class Server:
    """Takes jobs, gives them to replicas, and keeps their results.

    Attributes:
        models: of pictures and videos.
        texts: models of text, by name.
        upstream: address of another server whose models are served too; None for none.
        served_names: further names by which clients may ask for models.
        folder: for files and the journal.
        limits: what one request may ask for.
        key: that clients must show; None for none.
        runner: runs the ranks.
        num_replicas: replicas of each model of pictures and videos.
        jobs: by name, the oldest first.
        replicas: by the name of their model; filled when the server starts.
        rooms: where requests wait for them, by the same names.
        watchers: of the jobs.
        metrics: of the server.
        responses: those of text models that later ones can follow.
        leaves_at: when jobs that still run are left to the next server, by `time.monotonic`; None while it serves.
    """

    models: Sequence[PictureService]
    texts: dict[str, ServedText] = field(default_factory=dict)
    upstream: str | None = None
    served_names: ServedNames = field(default_factory=ServedNames)
    folder: Path
    limits: Limits = field(default_factory=Limits)
    key: str | None = None
    runner: RankRunner = LOCAL
    num_replicas: int = 1
    jobs: dict[str, Job] = field(default_factory=dict)
    replicas: dict[str, Replicas] = field(default_factory=dict)
    rooms: dict[str, WaitingRoom] = field(default_factory=dict)
    watchers: Watchers = field(default_factory=Watchers)
    metrics: Metrics = field(default_factory=Metrics)
    responses: ResponseStore = field(default_factory=ResponseStore)

    leaves_at: float | None = None

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
        self._stepped: dict[str, float] = {}  # when each running job made its last step
        self._comparing: dict[str, asyncio.Task[None]] = {}
        self._suspects: dict[str, Suspects] = {}
        self.unwritten: set[str] = set()  # jobs whose last change the journal does not know
        self.created = int(time.time())
        for job in self.journal.read():
            self.jobs[job.id] = job
            if not job.has_ended:
                self._take_up(job)
        for model in self.models:
            replicas = Replicas(model, self.runner, self.num_replicas, on_message=self._take, on_lost=self._lost)
            self.replicas[model.name] = replicas
            self._suspects[model.name] = Suspects(replicas.submit)
            self.rooms[model.name] = WaitingRoom(replicas, self.limits, lambda: self.leaves_at is not None)
            self.metrics.replicas.labels(model.name).set_function(partial(attrgetter("num_ready"), replicas))
            replicas.start()
        await self._start_texts()
        self._sweeper = asyncio.create_task(sweep(self))

    async def close(self) -> None:
        """Ends all replicas, after the grace of `leave`; other jobs are resumed by the next server with this folder."""
        await self._finish_running()
        self._sweeper.cancel()
        for task in self._starts.values():
            task.cancel()
        await asyncio.gather(*(each.close() for each in (*self.replicas.values(), *self.texts.values())))
        if self._other is not None:
            await self._other.close()
        self.journal.close()

    async def _start_texts(self) -> None:
        from partsong.serving.texts.upstream import Upstream, UpstreamText

        self._other = None if self.upstream is None else Upstream(self.upstream)
        if self._other is not None:
            for name in await self._other.models():
                self.texts.setdefault(name, UpstreamText(name, self._other))
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
        self, model: PictureService, request: Mapping[str, Any], *, twin_of: str | None = None, **more: Any
    ) -> Job:
        """Takes a job.

        Args:
            model: what makes it.
            request: by the names of `Job.request`.
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
        )
        work = work_of(job, self.file, facts.defaults, strategies, **more)
        self.limits.check_queue(self.jobs.values(), model.name)
        checked = await room.check(work)
        if checked.error is not None:
            raise checked.error
        self.limits.check_queue(self.jobs.values(), model.name)  # more jobs have arrived while the ranks were asked
        job.exactness = checked.kind
        job.steps = int(work.arguments.get("num_inference_steps", 0))
        self._add(job, work)
        return job

    def cancel(self, job: Job) -> None:
        """Drops a job wherever it stands; one that has ended stays as it is."""
        if not job.has_ended and job.id not in self._comparing:
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
        self._count(job.model)

    def _take_up(self, job: Job) -> None:
        """Restarts a job that the last server left behind."""
        was = "began" if job.status == "in_progress" else "waited for its turn"
        job.begin_anew(f"after the server ended; it {was} then")
        if all(model.name != job.model for model in self.models):
            self._end(job, "failed", code="model_gone", message=f"{job.model} is not served any more")

    def _take(self, replicas: Replicas, message: FromRanks) -> None:
        """Notes what the ranks of a replica say."""
        if isinstance(message, Ready):
            self._model_ready(replicas, message)
            self.rooms[replicas.name].note()
            return
        job = None if isinstance(message, Pulse) else self.jobs.get(message.id)
        if job is None or job.has_ended:
            return
        if isinstance(message, JobStarted):
            job.status, job.started_at = "in_progress", time.time()
            self.metrics.queued.labels(job.model).observe(job.started_at - job.created_at)
            self.save(job)
        elif isinstance(message, JobStepped):
            self._step(job, message)
            return  # by far the most frequent message, and no job begins or ends with one
        elif isinstance(message, JobFinished):
            self._finish(job, message)
        elif isinstance(message, JobFailed):
            is_request = as_api_error(message.error).status == 400
            is_full = isinstance(message.error, OutputError)
            code = "refused" if is_request else "no_room" if is_full else "server_error"
            self._end(job, "failed", code=code, message=str(message.error))
        elif isinstance(message, JobCancelled):
            self._end(job, "cancelled")
        self._count(job.model)

    def _step(self, job: Job, message: JobStepped) -> None:
        now, labels = time.monotonic(), labels_of(job)
        self.metrics.steps.labels(*labels).inc(max(0, message.step - job.step))
        if job.id in self._stepped:
            self.metrics.step_seconds.labels(*labels).observe(now - self._stepped[job.id])
        self._stepped[job.id] = now
        job.step, job.steps, job.spent = message.step, message.steps or job.steps, message.spent or job.spent
        if job.kind == "video" and not job.files and self.file(f"{job.id}.mp4").is_file():
            job.files = (f"{job.id}.mp4",)  # its first frames can be played while later ones are made
        if message.previews:
            self.watchers.show(job.id, message.step, message.previews)
        self.watchers.change(job.id)

    def _finish(self, job: Job, message: JobFinished) -> None:
        job.spent, job.seconds = message.spent, message.seconds
        job.files = files_of(job)
        note_size(job, self.file(job.files[0]))
        sent = sum(spent.bytes_sent for spent in message.spent)
        self.metrics.bytes_sent.labels(*labels_of(job)).inc(sent)
        other = self.jobs.get(job.twin_of or job.twin or "")
        if other is None or other.status != "completed":
            self._complete(job)
        else:
            self._comparing[job.id] = asyncio.create_task(self._compare(job, other))

    async def _compare(self, job: Job, other: Job) -> None:
        """Compares a job with its serial twin, or a twin with its job, before anybody is notified that it is done."""
        await note_difference(job, other, self.file)
        self.save(other)
        self._comparing.pop(job.id)
        self._complete(job)

    def _complete(self, job: Job) -> None:
        self._end(job, "completed")
        self.metrics.seconds.labels(*labels_of(job)).observe(time.time() - job.created_at)
        self._count(job.model)

    def _end(self, job: Job, status: Any, *, code: str = "", message: str = "") -> None:
        now = time.time()
        job.status, job.completed_at, job.expires_at = status, now, now + self.limits.kept_seconds
        job.error = {"code": code, "message": message} if message else None
        self._stepped.pop(job.id, None)
        self.metrics.ended.labels(job.model, status).inc()
        self.write(job)
        self.watchers.forget(job.id)
        if job.losses and job.model in self._suspects:
            self._suspects[job.model].end(job.id)
            self._suspects[job.model].try_next()

    def _model_ready(self, replicas: Replicas, facts: Ready) -> None:
        """Submits what the last server left behind; describing those jobs takes facts that only the ranks know."""
        for job in list(self.jobs.values()):
            is_suspect = self._suspects[replicas.name].holds(job.id)
            if job.model == replicas.name and job.status == "queued" and not is_suspect:
                strategies = () if job.strategy == SERIAL else tuple(job.strategy.split("+"))
                replicas.submit(work_of(job, self.file, facts.defaults, strategies))

    def _lost(self, replicas: Replicas, begun: Mapping[str, JobWork], error: PartsongError) -> None:
        """Restarts the jobs of ranks that died where other ranks can make them, and fails them elsewhere."""
        self.metrics.restarts.labels(replicas.name).inc()
        for job, work in [(self.jobs[name], work) for name, work in begun.items()]:
            job.losses += 1
            if job.losses < _TRIES:
                job.begin_anew(f"after the ranks that made it ended: {error}")
                self._stepped.pop(job.id, None)
                for path in work.out:  # part of a video
                    path.unlink(missing_ok=True)
                self.save(job)
                self._suspects[replicas.name].add(work)
            else:
                self._end(job, "failed", code="ranks_ended", message=str(error))
        self.rooms[replicas.name].note()
        self._suspects[replicas.name].try_next()
        self._count(replicas.name)

    def _count(self, name: str) -> None:
        states = [job.status for job in self.jobs.values() if job.model == name]
        self.metrics.running.labels(name).set(states.count("in_progress"))
        self.metrics.waiting.labels(name).set(states.count("queued"))
