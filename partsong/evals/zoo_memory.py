"""Memory of long streams of the zoo, and whether what they show drifts."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partsong import zoo
from partsong.evals.compare import gather
from partsong.parallel import Mesh, Strategy, launch, mesh_for, parallelize
from partsong.samplers import stream

__all__ = ["study"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


def study(model: str, strategy: Strategy, *, nproc: int, frames: int, prompt: str, seed: int = 0) -> dict[str, Any]:
    """Streams one video and keeps an eye on it.

    Args:
        model: of the zoo.
        strategy: one that streams.
        nproc: ranks, one thread each.
        frames: of the video.
        prompt: a caption of the model's task.
        seed: of the noise.

    Returns:
        ``case model nproc frames seconds frames_per_second first_frame_seconds peak_mb quarter_mb end_mb facts_read
        identity_kept trend_colour trend_size``; megabytes per rank: the most in the whole run, and the mean resident
        memory over the second quarter and over the last one.
    """
    return launch(_on_rank, nproc, model, strategy, frames, prompt, seed)


def _on_rank(model: str, strategy: Strategy, frames: int, prompt: str, seed: int) -> dict[str, Any]:
    from diffusers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    row, pipe = zoo.MODELS[model], zoo.load(model)
    pipe.set_progress_bar_config(disable=True)
    degrees: dict[str, Any] = mesh_for((strategy,), int(os.environ["WORLD_SIZE"]))
    with Mesh(**degrees, timeout=1800.0) as mesh, parallelize(pipe, strategy, mesh=mesh) as plan:
        call = {**row.defaults, "prompt": prompt, "num_frames": frames, "output_type": "np"}
        call["generator"] = torch.Generator().manual_seed(seed)
        start, first, parts, resident = time.perf_counter(), 0.0, [], []
        for part in stream(plan, **call):
            resident.append(_resident())
            if part is not None:
                first = first or time.perf_counter() - start
                # Kept in a byte per value, so that what is looked at later does not count as memory of the stream.
                parts.append(np.rint(part.frames[0] * 255).astype(np.uint8))
                resident[-1] -= sum(p.nbytes for p in parts) / 1e6
        seconds = time.perf_counter() - start
        gc.collect()
        fourth = max(1, len(resident) // 4)
        quarter, end = float(np.mean(resident[fourth : 2 * fourth])), float(np.mean(resident[-fourth:]))
        spent = gather(mesh, [max(resident), quarter, end], "end of a stream")
        if not mesh.is_main:
            return {}
        video = np.concatenate(parts)
        trend = row.task.trend(video)
        return {
            "case": repr(strategy),
            "model": model,
            "nproc": mesh.world_size,
            "frames": len(video),
            "seconds": seconds,
            "frames_per_second": len(video) / seconds,
            "first_frame_seconds": first,
            "peak_mb": [row[0] for row in spent],
            "quarter_mb": [row[1] for row in spent],
            "end_mb": [row[2] for row in spent],
            "facts_read": row.task.facts_read(prompt, video),
            "identity_kept": row.task.identity_kept(prompt, video),
            "trend_colour": trend["colour"],
            "trend_size": trend["size"],
        }


def _resident() -> float:
    """Resident memory of this process, in megabytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / 1e6
