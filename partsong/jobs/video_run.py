"""Samples one video with a pipeline or a plan, and notes when each part of it was done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError, PartsongError
from partsong.jobs.compare import finite
from partsong.parallel import Plan
from partsong.samplers.generate import can_stream, generate, stream
from partsong.videos import VideoWriter

__all__ = ["VideoRun", "sample_video"]


@dataclass(slots=True)
class VideoRun:
    """Holds the outcome of one run on this rank.

    Attributes:
        frames: each part `[F, H, W, 3]` in [0, 1], kept to be scored and compared; empty on ranks that decode nothing.
        borders: the number of the first frame of each part after the first.
        times: seconds until each part was done.
        size: height and width of the frames; (0, 0) on ranks that decode nothing.
        num_frames: how many frames were delivered.
        num_cut: how many more were sampled, and cut off at the end.
        seconds: wall time.
    """

    frames: list[Any] = field(default_factory=list)
    borders: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    size: tuple[int, int] = (0, 0)
    num_frames: int = 0
    num_cut: int = 0
    seconds: float = 0.0

    @property
    def first(self) -> float:
        """Returns the seconds until the first part was done, or 0 on ranks that decode nothing."""
        return self.times[0] if self.times else 0.0


def sample_video(
    target: Plan | Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    journal: Path | None = None,
    writer: VideoWriter | None = None,
    keeps: bool = True,
    num_frames: int | None = None,
) -> VideoRun:
    """Samples one video.

    Args:
        target: a plan, a pipeline, or any function that takes a pipeline's arguments and returns its output.
        arguments: of the call; the output type is set to arrays.
        journal: see `partsong.samplers.stream`.
        writer: takes the frames as they come, and is closed at the end even if sampling fails.
        keeps: whether to keep the frames.
        num_frames: how many frames to deliver; the rest is cut off. None delivers all.

    Raises:
        ArgumentError: the pipeline refuses the value of an argument.
        NotANumberError: a frame holds a NaN.
    """
    run, start = VideoRun(), time.perf_counter()
    try:
        for part in _parts(target, {**arguments, "output_type": "np"}, journal):
            if part is None:
                continue
            room = len(part) if num_frames is None else num_frames - run.num_frames
            run.num_cut += max(len(part) - room, 0)
            part = part[:room]
            if not len(part):
                continue
            finite(part)
            run.times.append(time.perf_counter() - start)
            run.size = part.shape[1:3]
            if run.num_frames:
                run.borders.append(run.num_frames)
            run.num_frames += len(part)
            if writer is not None:
                writer.append(part)
            if keeps:
                run.frames.append(part)
    finally:
        if writer is not None:
            writer.close()
    run.seconds = time.perf_counter() - start
    return run


def _parts(target: Plan | Callable[..., Any], arguments: dict[str, Any], journal: Path | None) -> Iterator[Any]:
    """Yields the frames `[F, H, W, 3]` of one call, part by part; None on ranks that decode nothing."""
    try:
        if not isinstance(target, Plan):
            yield target(**arguments).frames[0]
        elif can_stream(target.loop):
            for part in stream(target, journal=journal, **arguments):
                yield None if part is None else part.frames[0]
        else:
            yield generate(target, **arguments).frames[0]
    except PartsongError:
        raise
    except (TypeError, ValueError) as error:
        pipe = target.target if isinstance(target, Plan) else target
        raise ArgumentError(f"{type(pipe).__name__} refused the call: {error}") from error
