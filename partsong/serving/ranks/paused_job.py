"""Keeps one job's call of the pipeline, paused at every call of the denoiser."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from partsong.errors import ArgumentError, PartsongError
from partsong.jobs.compare import finite
from partsong.outputs import save_image
from partsong.parallel.hooks.replaced_method import Method, replace_method
from partsong.samplers.pipeline.paused import Denoise, Finished, PausedCall, Stepped
from partsong.serving.messages import JobWork, Spent
from partsong.serving.ranks.served_model import ServedModel, call_arguments
from partsong.videos import VideoWriter

__all__ = ["JobError", "PausedJob", "refused", "write_output"]


class JobError(PartsongError, RuntimeError):
    """Says that a pipeline failed on a job that it had taken."""


class PausedJob:
    """Runs a job from one call of the denoiser to the next.

    Args:
        model: what runs it.
        work: the job.
        decodes: whether this rank decodes and writes the result.

    Attributes:
        work: the job.
        arguments: of the pending call of the denoiser, or of the last one.
        positions: names of those that came by position.
        calls: how many calls of the denoiser the current step has made.
        step: steps made.
        steps: steps in all; 0 before the first call of the denoiser.
        is_done: whether it is finished.
        spent: by rank; on the first rank only.
        begun: when it began, in seconds of `time.perf_counter`.
        latents: what the scheduler made in its last step; None before the first.
        images: the pictures, once they are decoded; None before, and for a video.
        last: what the scheduler was given in its last step: the model's prediction, the timestep and the sample.
    """

    def __init__(self, model: ServedModel, work: JobWork, *, decodes: bool) -> None:
        self.work, self.step, self.steps, self.calls = work, 0, 0, 0
        self.is_done = False
        self.spent: list[Spent] = []
        self.begun = time.perf_counter()
        self.last: tuple[Any, Any, Any] | None = None
        self.latents: Any = None
        self.images: Any = None
        self.arguments: dict[str, Any] = {}
        self.positions: tuple[str, ...] = ()
        self._decodes = decodes
        self._name = type(model.pipe).__name__
        self._call = PausedCall(model.pipe, model.part, call_arguments(model, work), decodes=decodes)
        replace_method(self._call.pipe.scheduler, "step", self._noting)

    @property
    def pipe(self) -> Any:
        """Returns the copy of the pipeline that is called."""
        return self._call.pipe

    def begin(self) -> None:
        """Runs to the first call of the denoiser.

        Raises:
            PartsongError: the pipeline refuses the call.
        """
        self._follow(None)
        self.steps = len(getattr(self._call.pipe.scheduler, "timesteps", ()))

    def answer(self, output: Any) -> bool:
        """Gives the pipeline what the denoiser returned and runs to its next call; says whether a step has ended.

        Raises:
            PartsongError: the pipeline failed.
        """
        before, self.calls = self.step, self.calls + 1
        self._follow(output)
        return self.step > before or self.is_done

    def close(self) -> None:
        """Ends the call where it stands."""
        self._call.close()

    def _follow(self, answer: Any) -> None:
        try:
            event = self._call.send(answer)
            while isinstance(event, Stepped):
                self.step, self.calls, self.latents = self.step + 1, 0, event.latents
                event = self._call.send(event.latents)
            if isinstance(event, Denoise):
                self.arguments, self.positions = event.arguments, event.positions
            elif self._decodes:
                self.images = getattr(event.output, "images", None)
                write_output(event.output, self.work)
            self.is_done = isinstance(event, Finished)
        except Exception as error:  # a pipeline can fail in any way, and its client must be notified
            self._call.close()
            raise refused(self._name, error) from error

    def _noting(self, step: Method) -> Method:
        def note_and_step(model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
            self.last = (model_output, timestep, sample)
            return step(model_output, timestep, sample, *args, **kwargs)

        return note_and_step


def refused(name: str, error: Exception) -> PartsongError:
    """Returns the error for a client in place of one that a pipeline raised."""
    if isinstance(error, PartsongError):
        return error
    if isinstance(error, (TypeError, ValueError)):
        return ArgumentError(f"{name} refused the call: {error}")
    return JobError(f"{name} failed: {type(error).__name__}: {error}")


def write_output(output: Any, work: JobWork) -> None:
    """Writes the pictures or the video that a pipeline returned.

    Raises:
        NotANumberError: one holds a NaN.
    """
    if hasattr(output, "frames"):
        with VideoWriter(work.out[0], fps=work.fps) as writer:
            writer.append(finite(np.asarray(output.frames[0]))[: work.num_frames])
        return
    for picture, path in zip(finite(np.asarray(output.images)), work.out, strict=True):
        save_image(picture, path)
