"""Notes what the ranks of a server say of their jobs: that they begin, make steps, are done, fail or are lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Protocol

from partsong.errors import OutputError, PartsongError
from partsong.serving.errors import as_api_error
from partsong.serving.expiry import JobKeeper
from partsong.serving.files.made_sizes import note_size
from partsong.serving.jobs import Job, Watchers
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
from partsong.serving.operating.chores import Chores
from partsong.serving.replicas import Replicas
from partsong.serving.services import SERIAL, files_of, work_of
from partsong.serving.suspects import Suspects
from partsong.serving.twins import note_difference
from partsong.serving.waiting_room import WaitingRoom

__all__ = ["JobProgress"]

#: How often the ranks of a job may die before it fails: it may be what kills them. After the first time it is made
#: beside no other job that has lost its ranks, so that such a one takes no others with it.
_TRIES = 3


class JobServer(JobKeeper, Protocol):
    """Describes what has ranks and jobs: the server."""

    rooms: dict[str, WaitingRoom]
    watchers: Watchers
    metrics: Metrics
    limits: Limits
    chores: Chores

    def save(self, job: Job) -> None:
        """Writes a job to the journal, and wakes up everybody who waits for it."""
        ...


class JobProgress:
    """Changes the jobs of a server as its ranks go on with them.

    Args:
        server: whose jobs they are.

    Attributes:
        comparing: tasks that look at what a job has made, perhaps beside its twin, by the job's name.
        suspects: jobs that have lost their ranks, by the name of their model.
    """

    def __init__(self, server: JobServer) -> None:
        self._server = server
        self._stepped: dict[str, float] = {}  # when each running job made its last step
        self.comparing: dict[str, asyncio.Task[None]] = {}
        self.suspects: dict[str, Suspects] = {}

    def take(self, replicas: Replicas, message: FromRanks) -> None:
        """Notes what the ranks of a replica say."""
        if isinstance(message, Ready):
            self._model_ready(replicas, message)
            self._server.rooms[replicas.name].note()
            return
        job = None if isinstance(message, Pulse) else self._server.jobs.get(message.id)
        if job is None or job.has_ended:
            return
        if isinstance(message, JobStarted):
            job.status, job.started_at = "in_progress", time.time()
            self._server.metrics.queued.labels(job.model).observe(job.started_at - job.created_at)
            self._server.save(job)
        elif isinstance(message, JobStepped):
            self._step(job, message)
            return  # by far the most frequent message, and no job begins or ends with one
        elif isinstance(message, JobFinished):
            self._finish(job, message)
        elif isinstance(message, JobFailed):
            is_request = as_api_error(message.error).status == 400
            is_full = isinstance(message.error, OutputError)
            code = "refused" if is_request else "no_room" if is_full else "server_error"
            self.end(job, "failed", code=code, message=str(message.error))
        elif isinstance(message, JobCancelled):
            self.end(job, "cancelled")
        self.count(job.model)

    def _step(self, job: Job, message: JobStepped) -> None:
        now, labels = time.monotonic(), labels_of(job)
        self._server.metrics.steps.labels(*labels).inc(max(0, message.step - job.step))
        if job.id in self._stepped:
            self._server.metrics.step_seconds.labels(*labels).observe(now - self._stepped[job.id])
        self._stepped[job.id] = now
        job.step, job.steps, job.spent = message.step, message.steps or job.steps, message.spent or job.spent
        if job.kind == "video" and not job.files and self._server.file(f"{job.id}.mp4").is_file():
            job.files = (f"{job.id}.mp4",)  # its first frames can be played while later ones are made
        if message.previews:
            self._server.watchers.show(job.id, message.step, message.previews)
        self._server.watchers.change(job.id)

    def _finish(self, job: Job, message: JobFinished) -> None:
        job.spent, job.seconds = message.spent, message.seconds
        job.files = files_of(job)
        sent = sum(spent.bytes_sent for spent in message.spent)
        self._server.metrics.bytes_sent.labels(*labels_of(job)).inc(sent)
        other = self._server.jobs.get(job.twin_of or job.twin or "")
        twin = None if other is None or other.status != "completed" else other
        if job.kind == "image" and twin is None:
            note_size(job, self._server.file(job.files[0]))
            self._complete(job)
        else:
            self.comparing[job.id] = asyncio.create_task(self._look(job, twin))

    async def _look(self, job: Job, twin: Job | None) -> None:
        """Looks at a video, or compares a job with its serial twin, before anybody is notified that it is done."""
        await asyncio.to_thread(note_size, job, self._server.file(job.files[0]))
        if twin is not None:
            await note_difference(job, twin, self._server.file)
            self._server.save(twin)
        self.comparing.pop(job.id)
        self._complete(job)

    def _complete(self, job: Job) -> None:
        self.end(job, "completed")
        if self._server.outputs is not None:
            files = [self._server.file(name) for name in job.files]
            self._server.chores.begin(asyncio.to_thread(self._server.outputs.keep, job, files))
        self._server.metrics.seconds.labels(*labels_of(job)).observe(time.time() - job.created_at)
        self.count(job.model)

    def end(self, job: Job, status: Any, *, code: str = "", message: str = "") -> None:
        """Ends a job, with an error where there is a message."""
        now = time.time()
        job.status, job.completed_at, job.expires_at = status, now, now + self._server.limits.kept_seconds
        job.error = {"code": code, "message": message} if message else None
        self._stepped.pop(job.id, None)
        self._server.metrics.note_end(job)
        self._server.write(job)
        self._server.watchers.forget(job.id)
        if job.losses and job.model in self.suspects:
            self.suspects[job.model].end(job.id)
            self.suspects[job.model].try_next()

    def _model_ready(self, replicas: Replicas, facts: Ready) -> None:
        """Submits what the last server left behind; describing those jobs takes facts that only the ranks know."""
        for job in list(self._server.jobs.values()):
            is_suspect = self.suspects[replicas.name].holds(job.id)
            if job.model == replicas.name and job.status == "queued" and not is_suspect:
                strategies = () if job.strategy == SERIAL else tuple(job.strategy.split("+"))
                replicas.submit(work_of(job, self._server.file, facts.defaults, strategies))

    def lost(self, replicas: Replicas, begun: Mapping[str, JobWork], error: PartsongError) -> None:
        """Restarts the jobs of ranks that died where other ranks can make them, and fails them elsewhere."""
        self._server.metrics.restarts.labels(replicas.name).inc()
        for job, work in [(self._server.jobs[name], work) for name, work in begun.items()]:
            job.losses += 1
            if job.losses < _TRIES:
                job.begin_anew(f"after the ranks that made it ended: {error}")
                self._stepped.pop(job.id, None)
                for path in work.out:  # part of a video
                    path.unlink(missing_ok=True)
                self._server.save(job)
                self.suspects[replicas.name].add(work)
            else:
                self.end(job, "failed", code="ranks_ended", message=str(error))
        self._server.rooms[replicas.name].note()
        self.suspects[replicas.name].try_next()
        self.count(replicas.name)

    def count(self, name: str) -> None:
        """Counts the jobs of a model that run and wait."""
        states = [job.status for job in self._server.jobs.values() if job.model == name]
        self._server.metrics.running.labels(name).set(states.count("in_progress"))
        self._server.metrics.waiting.labels(name).set(states.count("queued"))
