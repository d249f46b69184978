"""Runs a pipeline in parallel and as its serial twin, and measures the difference and the speed of the two.

One whole call of the pipeline is timed, with text encoding and decoding, but without loading and one short warm-up
call. The serial twin is the pipeline with nothing attached on rank 0. It has as many threads as each rank has, and the
other ranks wait idle. The parallel run begins when all ranks are ready and ends when the last is done.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from partsong.errors import NotANumberError
from partsong.ledger import Ledger
from partsong.outputs import max_abs_diff, psnr
from partsong.parallel import Mesh, Plan
from partsong.parallel.ranks.collectives import agree

__all__ = [
    "WARM_UP_STEPS", "Draw", "Drift", "ComparedRun", "drift", "finite", "gather", "on_all_ranks", "parallel_run",
    "serial_run",
]  # fmt: skip

#: Steps of the warm-up call: cheap, but enough for the costs of a first call (allocation, threads, first exchange).
WARM_UP_STEPS = 2

Images = NDArray[np.floating[Any]]
#: Calls a pipeline or a plan and returns images `[N, H, W, 3]` in [0, 1]. The number replaces the steps unless None.
Draw = Callable[[Any, int | None], Images]
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """Measures how far images are from their serial twins.

    Attributes:
        psnr: in dB, the median over the images; infinite when they are equal.
        psnr_worst: in dB, of the image that is furthest away.
        max_abs_diff: largest difference of any value, on images in [0, 1] before rounding to 8 bits.
    """

    psnr: float
    psnr_worst: float
    max_abs_diff: float

    def as_json(self, seconds: float, seconds_serial: float) -> dict[str, float]:
        """Returns the comparison with the serial twin by JSON key."""
        return {
            "seconds_serial": seconds_serial,
            "speedup": seconds_serial / seconds,
            "psnr_to_serial": self.psnr,
            "psnr_to_serial_worst": self.psnr_worst,
            "max_abs_diff": self.max_abs_diff,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """Describes one timed run.

    Attributes:
        images: `[N, H, W, 3]` in [0, 1].
        seconds: wall time, or the median of several.
        kind: ``exact``, ``bounded`` or ``approximate``.
        bytes_sent: bytes that each rank sent.
        seconds_waiting: how long each rank waited for messages.
        explanation: what was split and moved, in words.
    """

    images: Images
    seconds: float
    kind: str = "exact"
    bytes_sent: tuple[int, ...] = ()
    seconds_waiting: tuple[float, ...] = ()
    explanation: str = ""


def finite(images: Images) -> Images:
    """Returns images, or frames of a video, that show something.

    Raises:
        NotANumberError: one holds a NaN, which would be written as black.
    """
    if np.isfinite(images).all():
        return images
    shares = 1 - np.isfinite(images).reshape(len(images), -1).mean(axis=1)
    bad = int(shares.argmax())
    raise NotANumberError(
        f"{shares[bad]:.0%} of image {bad} is NaN or infinite, which would be written as black; look for such numbers "
        f"in the weights, or use dtype bfloat16 or float32 if float16 overflowed"
    )


def drift(images: Images, reference: Images) -> Drift:
    """Compares images with their serial twins, one by one."""
    ratios = [psnr(one, other) for one, other in zip(images, reference, strict=True)] or [math.inf]
    return Drift(psnr=statistics.median(ratios), psnr_worst=min(ratios), max_abs_diff=max_abs_diff(images, reference))


def gather(mesh: Mesh, values: Sequence[float], name: str) -> list[list[float]]:
    """Collects the numbers of every rank on every rank; this also makes the ranks wait for each other."""
    everyone = mesh.axis(*(axis for axis, degree in mesh.degrees.items() if degree > 1))
    return [list(row) for row in agree(everyone, list(values), name=name)]


def serial_run(pipe: Any, mesh: Mesh, draw: Draw, *, warm_up: bool = True, repeats: int = 1) -> ComparedRun | None:
    """Times the pipeline with nothing attached on rank 0 while the other ranks wait.

    Returns:
        The run on rank 0, and None on the others.
    """
    run = None
    if mesh.is_main:
        if warm_up:
            draw(pipe, WARM_UP_STEPS)
        timed = [_timed(lambda: draw(pipe, None)) for _ in range(repeats)]
        run = ComparedRun(
            images=timed[-1][0],
            seconds=statistics.median(seconds for _, seconds in timed),
            bytes_sent=(0,) * mesh.world_size,
            seconds_waiting=(0.0,) * mesh.world_size,
        )
    gather(mesh, [0.0], "wait for the serial twin")
    return run


def on_all_ranks(
    mesh: Mesh, action: Callable[[], Value], ledger: Path | None = None
) -> tuple[Value, list[list[float]]]:
    """Times an action that all ranks begin together.

    Args:
        mesh: the ranks.
        action: what each of them does.
        ledger: file for the records, if any.

    Returns:
        What it returned on this rank; and for every rank its seconds, the bytes that it sent and the seconds it waited.
    """
    gather(mesh, [0.0], "start of the timed run")
    with Ledger(ledger) as records:
        value, seconds = _timed(action)
    spent = records.summary()
    return value, gather(mesh, [seconds, spent["bytes_sent"], spent["seconds_waiting"]], "end of the timed run")


def parallel_run(plan: Plan, draw: Draw, *, warm_up: bool = True, ledger: Path | None = None) -> ComparedRun:
    """Times a pipeline under a plan, all ranks together, and undoes the plan.

    Args:
        plan: strategies on a pipeline, the same on every rank.
        draw: the call.
        warm_up: make a short call first, untimed and not in the ledger.
        ledger: file for the records of the timed call, if any.
    """
    mesh = plan.mesh
    with plan:
        if warm_up:
            with Ledger():  # the first use of a ledger costs time too
                draw(plan, WARM_UP_STEPS)
        images, rows = on_all_ranks(mesh, lambda: draw(plan, None), ledger)
        return ComparedRun(
            images=images,
            seconds=max(row[0] for row in rows),
            kind=plan.kind,
            bytes_sent=tuple(int(row[1]) for row in rows),
            seconds_waiting=tuple(row[2] for row in rows),
            explanation=str(plan.explain()),
        )


def _timed(action: Callable[[], Value]) -> tuple[Value, float]:
    start = time.perf_counter()
    value = action()
    return value, time.perf_counter() - start
