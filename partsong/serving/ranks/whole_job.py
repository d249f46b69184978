"""Runs one job to its end in the loop that its strategies need."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from partsong.errors import DistributedError, OutputError
from partsong.jobs.video_run import sample_video
from partsong.parallel import Mesh, Plan
from partsong.samplers.generate import can_stream, generate
from partsong.serving.messages import JobWork
from partsong.serving.ranks.orders import share_switch
from partsong.serving.ranks.outcome import TurnOutcome
from partsong.serving.ranks.paused_job import refused, write_output
from partsong.serving.ranks.served_model import ServedModel, call_arguments
from partsong.videos import VideoWriter

__all__ = ["WholeJob"]


class _Dropped(BaseException):
    """Unwinds a call that is to be dropped; no pipeline catches it."""


class WholeJob:
    """Runs a job under a plan on the whole pipeline.

    The pipeline's own loop reports each step, and all ranks leave it at the same one. No single rank can leave a
    strategy's own loop: there the first rank's office ends the ranks.

    Args:
        model: what runs it.
        mesh: all ranks.
        work: the job.
        report: takes the job, its steps made and in all; says on the first rank whether to drop it.
    """

    def __init__(
        self, model: ServedModel, mesh: Mesh, work: JobWork, report: Callable[[JobWork, int, int], bool]
    ) -> None:
        self._model, self._mesh, self._work, self._report = model, mesh, work, report

    def run(self, outcome: TurnOutcome) -> None:
        """Runs the job and notes its outcome."""
        work = self._work
        try:
            with self._model.whole_plan(work.setting) as plan:
                self._sample(plan)
            outcome.done.append(work.id)
        except _Dropped:
            outcome.dropped.append(work.id)
        except (DistributedError, OutputError, torch.AcceleratorError):
            raise  # here only: the others wait for this rank in an exchange
        except Exception as error:  # noqa: BLE001 - any pipeline can fail in any way; mostly on all ranks alike
            self._mesh.abandon()
            outcome.failed[work.id] = refused(type(self._model.pipe).__name__, error)

    def _sample(self, plan: Plan) -> None:
        arguments = call_arguments(self._model, self._work)
        known = inspect.signature(type(plan.target).__call__).parameters
        if plan.loop is None and "callback_on_step_end" in known:
            arguments["callback_on_step_end"] = self._stepped
        if not self._model.makes_videos:
            output = generate(plan, **arguments)
            if self._mesh.is_main:
                write_output(output, self._work)
            return
        num = self._work.num_frames
        sample_video(plan, arguments, writer=self._writer(plan, num), keeps=False, num_frames=num)

    def _writer(self, plan: Plan, num: int | None) -> VideoWriter | None:
        """Returns the writer of frames on the first rank; it also reports frames that are made one by one."""
        if not self._mesh.is_main:
            return None
        if can_stream(plan.loop):
            return _CountingWriter(self._work, num or 0, self._report)
        return VideoWriter(self._work.out[0], fps=self._work.fps)

    def _stepped(self, pipe: Any, index: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        wants_to_drop = self._report(self._work, index + 1, int(getattr(pipe, "num_timesteps", 0)))
        if share_switch(self._mesh.on_host("data"), wants_to_drop):
            raise _Dropped
        return given


class _CountingWriter(VideoWriter):
    """Writes a video and reports how many frames are written."""

    def __init__(self, work: JobWork, total: int, report: Callable[[JobWork, int, int], bool]) -> None:
        super().__init__(work.out[0], fps=work.fps)
        self._work, self._total, self._report, self._count = work, total, report, 0

    def append(self, frames: Iterable[Any]) -> None:
        """Writes frames and reports them."""
        every = list(frames)
        super().append(every)
        self._count += len(every)
        self._report(self._work, self._count, self._total)
