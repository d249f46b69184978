"""Removes jobs and files that have expired, and writes what a full disk did not take."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Protocol

from partsong.errors import OutputError
from partsong.serving.jobs import Job
from partsong.serving.journal import JobJournal
from partsong.serving.operating.outputs import DailyOutputs
from partsong.serving.services import files_of, pictures_of

__all__ = ["JobKeeper", "remove_jobs", "sweep"]

_log = logging.getLogger(__name__)

#: Seconds between two looks.
_PERIOD = 60.0


class JobKeeper(Protocol):
    """Describes what holds jobs: the server."""

    jobs: dict[str, Job]
    journal: JobJournal
    unwritten: set[str]
    outputs: DailyOutputs | None

    def write(self, job: Job) -> None:
        """Writes a job to the journal, later if the disk is full."""
        ...

    def file(self, name: str) -> Path:
        """Returns the path of a file of a job."""
        ...


async def sweep(server: JobKeeper) -> None:
    """Looks again and again, until it is cancelled."""
    while True:
        now = time.time()
        for name in list(server.unwritten):
            if name in server.jobs:
                server.write(server.jobs[name])
        expired = [job for job in server.jobs.values() if job.expires_at is not None and job.expires_at < now]
        await remove_jobs(server, expired)
        if server.outputs is not None:
            await asyncio.to_thread(server.outputs.remove_old, date.today())
        await asyncio.sleep(_PERIOD)


async def remove_jobs(server: JobKeeper, jobs: Sequence[Job]) -> None:
    """Forgets jobs that have ended, and removes their files beside the event loop."""
    paths = []
    for job in jobs:
        server.jobs.pop(job.id, None)
        server.unwritten.discard(job.id)
        sent = [*pictures_of(job), *([mask] if (mask := job.request.get("mask")) else [])]
        # A job that was dropped may have left part of a video.
        paths += [server.file(name) for name in (*files_of(job), *sent)]
    if not jobs:
        return
    try:
        server.journal.remove([job.id for job in jobs])
    except OutputError as error:
        _log.error("%s", error)  # the jobs are there again after the next start, and removed then
    await asyncio.to_thread(_remove, paths)


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.error("%s cannot be removed: %s", path, error)
