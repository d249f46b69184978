"""Measures the machine of a server, and lets its planner choose strategies anew by what was measured."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from partsong.jobs.pipeline_source import find_pipeline
from partsong.jobs.usual_strategy import usual_size, usual_strategy
from partsong.serving.denoising.sessions import DenoiseSessions
from partsong.serving.errors import ApiError
from partsong.serving.jobs import Job
from partsong.serving.operating.chores import Chores
from partsong.serving.runners import RankRunner
from partsong.serving.services import PictureService

__all__ = ["MachineMeasurement"]


class PlannedServer(Protocol):
    """Describes what has models that the planner can plan for: the server."""

    models: Sequence[PictureService]
    jobs: dict[str, Job]
    sessions: DenoiseSessions
    runner: RankRunner
    chores: Chores


class MachineMeasurement:
    """Runs ``partsong calibrate`` beside a server that has nothing to do.

    Args:
        server: whose models are planned anew.

    Attributes:
        is_running: whether it measures now.
        fault: why the last measurement failed; None where none did.
    """

    def __init__(self, server: PlannedServer) -> None:
        self._server = server
        self.is_running = False
        self.fault: str | None = None

    def begin(self) -> None:
        """Begins to measure; jobs that come meanwhile disturb it.

        Raises:
            ApiError: jobs wait or run, it measures already, or the ranks are elsewhere.
        """
        if self._server.runner.host is not None or not self._server.runner.starts_again:
            raise ApiError(409, "the ranks are started elsewhere; run `partsong calibrate` under torchrun there")
        if self.is_running:
            raise ApiError(409, "this machine is being measured already")
        if any(not job.has_ended for job in self._server.jobs.values()) or any(self._server.sessions):
            raise ApiError(409, "jobs wait or run, which would disturb the measurement; ask again when they are done")
        self.is_running, self.fault = True, None
        self._server.chores.begin(self._run())

    async def _run(self) -> None:
        try:
            ranks = max(model.nproc for model in self._server.models)
            command = [sys.executable, "-m", "partsong", "calibrate", "--nproc", str(ranks)]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=pipe)
            try:
                _, words = await process.communicate()
            finally:  # the server may end meanwhile
                if process.returncode is None:
                    process.kill()
            if process.returncode:
                self.fault = words.decode("utf-8", "replace").strip().rpartition("\n")[2] or "it ended without a word"
                return
            self._server.models = [await asyncio.to_thread(_planned, model) for model in self._server.models]
        finally:
            self.is_running = False


def _planned(model: PictureService) -> PictureService:
    """Returns a model with what the planner recommends now; one whose strategy was given stays as it is."""
    if model.advice is None:
        return model
    source = find_pipeline(model.settings.zoo_name or str(model.settings.folder))
    strategy, _, advice = usual_strategy(source, model.nproc, **usual_size(source))
    return replace(model, strategy=strategy, advice=advice)
