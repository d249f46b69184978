"""Bounds what one request may ask for, and how much a server holds at once."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partsong.serving.errors import ApiError
from partsong.serving.jobs import Job

__all__ = ["Limits"]

#: Seconds after which a refused client comes back at the latest, and where no job was done yet.
_LATEST, _UNKNOWN = 30.0, 10.0
#: How many jobs that were done last say how fast the queue moves.
_LAST = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Says how much one request may ask for.

    Attributes:
        pixels: most pixels per picture.
        frames: most frames per video.
        steps: most steps per job.
        num: most pictures per request.
        prompt: most characters of a prompt.
        body: most bytes of a request.
        body_seconds: most seconds for a request to arrive.
        waiting: most jobs in the queue of one model; more are refused until some are done.
        start_seconds: how long a request waits for ranks that are starting.
        kept_seconds: how long the files of a job are kept.
    """

    pixels: int = 4096 * 4096
    frames: int = 1000
    steps: int = 200
    num: int = 10
    prompt: int = 10_000
    body: int = 50_000_000
    body_seconds: float = 30.0
    waiting: int = 64
    start_seconds: float = 120.0
    kept_seconds: float = 24 * 3600.0

    def check_queue(self, jobs: Iterable[Job], model: str, *, more: int = 0) -> None:
        """Refuses a further job while too many wait.

        Args:
            jobs: of all models.
            model: its name.
            more: what else waits for the model.

        Raises:
            ApiError: the queue of the model is full; says when to try again.
        """
        of_model = [job for job in jobs if job.model == model]
        waiting = more + sum(job.status == "queued" for job in of_model)
        if waiting < self.waiting:
            return
        # Clients that were refused at the same time come back at different times, while there still is work.
        latest = max(2.0, min(_LATEST, _seconds_until_empty(of_model, waiting)))
        retry_after = random.uniform(latest / 2, latest)
        message = f"{waiting} jobs wait for {model} already; try again later"
        raise ApiError(429, message, code="queue_full", retry_after=retry_after)

    def check(
        self,
        *,
        prompt: str,
        num: int = 1,
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        frames: int | None = None,
    ) -> None:
        """Refuses a request that asks for more.

        Raises:
            ApiError: names the field, what was asked, and the most that is allowed.
        """
        if not prompt.strip():
            raise ApiError(400, "the prompt is empty; say what to draw", param="prompt")
        if len(prompt) > self.prompt:
            raise ApiError(400, f"the prompt has {len(prompt)} characters; use at most {self.prompt}", param="prompt")
        for name, value, most in (
            ("n", num, self.num),
            ("num_inference_steps", steps, self.steps),
            ("num_frames", frames, self.frames),
        ):
            if value is not None and not 1 <= value <= most:
                raise ApiError(400, f"{name}={value}; use a number from 1 to {most}", param=name)
        if width is not None and height is not None and not width * height:
            raise ApiError(
                400, f"size {width}x{height} has no pixels; write WIDTHxHEIGHT, such as 512x512", param="size"
            )
        if width is not None and height is not None and width * height > self.pixels:
            raise ApiError(
                400,
                f"size {width}x{height} has {width * height} pixels; this server makes {self.pixels} at most",
                param="size",
            )


def _seconds_until_empty(jobs: Sequence[Job], waiting: int) -> float:
    """Returns when the queue of a model will be empty, by how fast its last jobs ended one after another."""
    done = [(job.completed_at, job.seconds) for job in jobs if job.status == "completed"]
    last = sorted((end, seconds) for end, seconds in done if end is not None and seconds is not None)[-_LAST:]
    if not last:
        return _UNKNOWN
    longest = sum(seconds for _, seconds in last) / len(last)  # jobs that share the ranks end faster than one is made
    between = (last[-1][0] - last[0][0]) / (len(last) - 1) if len(last) > 1 else longest
    return waiting * min(between, longest)
