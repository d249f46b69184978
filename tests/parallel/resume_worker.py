"""Runs on every rank: long videos with a journal, killed at a given call of the model and taken up again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from partsong import DualParallel, TimestepPipeline
from partsong.parallel import parallelize
from partsong.samplers import stream
from partsong.samplers.long_video.staged_frames import StagedFrames
from tests.parallel import dual_worker, timestep_worker

FRAMES = 37


def _dual() -> tuple[Any, Any]:
    # A scheduler that remembers two steps, which have to be taken up as well.
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return dual_worker.pipeline(scheduler), DualParallel(block_frames=2, context=2)


def _rarely() -> tuple[Any, Any]:
    return dual_worker.pipeline(), DualParallel(block_frames=2, context=1, admit_every=2, previous="recomputed")


def _timestep() -> tuple[Any, Any]:
    return timestep_worker.pipeline(), TimestepPipeline(window=2, sink=1)


CASES = {"dual": (_dual, True), "rarely": (_rarely, True), "timestep": (_timestep, False)}


def video(name: str, journal: Path | None, killed: tuple[int, int] | None = None) -> tuple[Tensor | None, int]:
    """Latents of a video, on the first rank, and how often this rank ran the model.

    Args:
        name: the case.
        journal: where progress goes.
        killed: the rank and the call of its model at which it is killed; None is never.
    """
    build, guided = CASES[name]
    pipe, knobs = build()
    count, work = 0, StagedFrames.work

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if killed == (int(os.environ.get("RANK", "0")), count):
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*args, **kwargs)

    StagedFrames.work = counted  # type: ignore[method-assign]
    try:
        frames = FRAMES if name != "timestep" else 45
        with parallelize(pipe, knobs) as plan:
            parts = list(stream(plan, journal=journal, **dual_worker.call(frames, guided)))
            if plan.denoisers[0].seen.known:
                plan.explain()  # also of a run that has not seen its first blocks
    finally:
        StagedFrames.work = work  # type: ignore[method-assign]
    found = [part.frames for part in parts if part is not None]
    return (torch.cat(found, dim=2) if found else None), count
