"""One run of a video pipeline, with or without a plan: its frames part by part, and when they came."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError, PartsongError
from partsong.parallel import Plan
from partsong.samplers.generate import can_stream, generate, stream
from partsong.videos import VideoWriter

__all__ = ["Film", "shoot"]


@dataclass(slots=True)
class Film:
    """What came out of one run on this rank.

    Attributes:
        frames: kept for scoring and comparing, `[F, H, W, 3]` in [0, 1] each part; empty on ranks that decode nothing.
        borders: first frames of the parts but the first.
        times: seconds after which each part was there.
        num_frames: how many came.
        seconds: wall time.
    """

    frames: list[Any] = field(default_factory=list)
    borders: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    num_frames: int = 0
    seconds: float = 0.0

    @property
    def first(self) -> float:
        """Seconds until the first part was there; 0 where none came."""
        return self.times[0] if self.times else 0.0


def shoot(
    target: Plan | Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    journal: Path | None = None,
    writer: VideoWriter | None = None,
    keeps: bool = True,
) -> Film:
    """Samples one video.

    Args:
        target: a plan, a pipeline, or any function that takes a pipeline's arguments and returns its output.
        arguments: of the call; its output is asked for as arrays.
        journal: see `partsong.samplers.stream`.
        writer: takes the frames as they come, and is closed at the end, whatever happens.
        keeps: whether frames are kept.

    Raises:
        ArgumentError: the pipeline refuses the value of an argument.
    """
    film, start = Film(), time.perf_counter()
    try:
        for part in _parts(target, {**arguments, "output_type": "np"}, journal):
            if part is None:
                continue
            film.times.append(time.perf_counter() - start)
            if film.num_frames:
                film.borders.append(film.num_frames)
            film.num_frames += len(part)
            if writer is not None:
                writer.append(part)
            if keeps:
                film.frames.append(part)
    finally:
        if writer is not None:
            writer.close()
    film.seconds = time.perf_counter() - start
    return film


def _parts(target: Plan | Callable[..., Any], arguments: dict[str, Any], journal: Path | None) -> Iterator[Any]:
    """The frames `[F, H, W, 3]` of one call, part by part as they are done; None on ranks that decode nothing."""
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
