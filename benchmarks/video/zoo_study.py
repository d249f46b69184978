"""Samples long videos of the zoo by every method, and measures their content, time, memory and bytes."""

from __future__ import annotations

import os
import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from partsong import zoo
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.compare import gather
from partsong.jobs.video_run import VideoRun, sample_video
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.ranks.launch import launch
from partsong.parallel.ranks.shards import offsets, split_sizes
from partsong.samplers.long_video.sliding_windows import sliding_windows
from partsong.seeds import generators

__all__ = ["Case", "study"]

#: The serial method that the others are compared with.
BASELINE = "sliding windows"
#: Latent frames of a window, as in the zoo's training videos, and from one window to the next.
WINDOW, STRIDE = 16, 8
SHEET_FRAMES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Describes a method for long videos.

    Attributes:
        model: of the zoo.
        strategy: how to sample a long video; None is the baseline, on one rank.
    """

    model: str
    strategy: Strategy | None = None

    @property
    def name(self) -> str:
        """Returns the name of the method for tables."""
        return BASELINE if self.strategy is None else repr(self.strategy)


def study(
    cases: Sequence[Case], *, nproc: int, frames: int = 161, num_captions: int = 20, seed: int = 1
) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Samples a long video for each of several fresh captions with each method.

    Args:
        cases: the methods, each on all ranks.
        nproc: ranks, one thread each.
        frames: of each video.
        num_captions: fresh captions, one video each.
        seed: of captions and noise.

    Returns:
        A row per case: ``case model nproc num_captions frames facts_read identity_kept border_jump_ratio
        border_jump_typical trend_colour trend_size seconds first_frame_seconds peak_memory_mb bytes_sent``. Seconds and
        bytes (of the rank that sends most) are per video. Fractions are means over captions, ratios and trends medians.
        The second result is a strip of frames of the first caption for each case.
    """
    return launch(_on_rank, nproc, tuple(cases), frames, num_captions, seed)


def _on_rank(
    cases: tuple[Case, ...], frames: int, num_captions: int, seed: int
) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    quiet_libraries()
    torch.set_num_threads(1)
    world, rows, strips = int(os.environ.get("WORLD_SIZE", "1")), [], []
    for case in cases:
        pipe: Any = zoo.load(case.model)
        pipe.set_progress_bar_config(disable=True)
        degrees: dict[str, Any] = {"data": world} if case.strategy is None else mesh_for((case.strategy,), world)
        with Mesh(**degrees, timeout=1800.0) as mesh:
            runs, sent = _runs(case, pipe, mesh, frames, num_captions, seed)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
            spent = gather(mesh, [sent, peak], "end of a case")
            if mesh.is_main:
                row = {"case": case.name, "model": case.model, "nproc": 1 if case.strategy is None else world}
                used = {
                    "bytes_sent": max(row[0] for row in spent) / num_captions,
                    "peak_memory_mb": [row[1] for row in spent],
                }
                rows.append(row | _scores(case, runs, num_captions, seed, world) | used)
                strips.append(_strip(runs[0]))
    return rows, strips


def _runs(case: Case, pipe: Any, mesh: Mesh, frames: int, num_captions: int, seed: int) -> tuple[list[VideoRun], float]:
    row, runs = zoo.MODELS[case.model], []
    draws = generators(seed, num_captions)
    calls = [
        {**row.defaults, "num_frames": frames, "prompt": caption, "generator": draw}
        for caption, draw in zip(row.task.captions(num_captions, seed), draws, strict=True)
    ]
    with Ledger(flops=False) as ledger:
        if case.strategy is None:
            if mesh.is_main:
                runs = [sample_video(_Windows(pipe), call) for call in calls]
        else:
            with parallelize(pipe, case.strategy, mesh=mesh) as plan:
                runs = [sample_video(plan, call, keeps=mesh.is_main) for call in calls]
    return runs, ledger.summary().get("bytes_sent", 0.0)


class _Windows:
    """Calls the baseline like a pipeline."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def __call__(self, **arguments: Any) -> Any:
        return sliding_windows(self.pipe, window=WINDOW, stride=STRIDE, **arguments)


def _borders(case: Case, run: VideoRun, factor: int, world: int) -> list[int]:
    """Returns the frames at which parts of the video begin: blocks, the clips of ranks, or windows."""
    if run.borders:
        return run.borders
    latents = (run.num_frames - 1) // factor + 1
    if case.strategy is None:
        # A video of one window has no border, and shows in its middle what others are compared with.
        starts = range(STRIDE, latents - WINDOW + 1, STRIDE) or [latents // 2]
    else:
        starts = offsets(split_sizes(latents, max(world, 2)))[1:]
    return [1 + factor * (start - 1) for start in starts]


def _scores(case: Case, runs: list[VideoRun], num_captions: int, seed: int, world: int) -> dict[str, Any]:
    task, factor = zoo.MODELS[case.model].task, 2
    facts, identity, jumps, typical, trends = [], [], [], [], []
    for caption, run in zip(task.captions(num_captions, seed), runs, strict=True):
        video = np.concatenate(run.frames)
        facts += list(task.facts(caption, video).values())
        identity.append(task.identity_kept(caption, video))
        jump = task.border_jumps(video, _borders(case, run, factor, world))
        jumps.append(jump.ratio)
        typical.append(jump.typical)
        try:
            trends.append(task.trend(video))
        except ValueError:  # no object can be followed, which facts and identity show
            continue
    return {
        "num_captions": num_captions,
        "frames": runs[0].num_frames,
        "facts_read": float(np.mean(facts)),
        "identity_kept": float(np.mean(identity)),
        "border_jump_ratio": statistics.median(jumps),
        "border_jump_typical": statistics.median(typical),
        "trend_colour": statistics.median(t["colour"] for t in trends) if trends else None,
        "trend_size": statistics.median(t["size"] for t in trends) if trends else None,
        "seconds": statistics.median(run.seconds for run in runs),
        "first_frame_seconds": statistics.median(run.first for run in runs),
    }


def _strip(run: VideoRun) -> np.ndarray:
    """Returns evenly spaced frames of a video side by side, `[H, W * n, 3]`."""
    video = np.concatenate(run.frames)
    chosen = np.linspace(0, len(video) - 1, SHEET_FRAMES).round().astype(int)
    return np.concatenate(list(video[chosen]), axis=1)
