"""Measures the memory of long streams of the zoo, and whether their content drifts."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partsong import zoo
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.compare import gather
from partsong.parallel import Mesh, Plan, Strategy, mesh_for, parallelize
from partsong.parallel.ranks.launch import launch
from partsong.samplers import stream

__all__ = ["study"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Frames of a training video of the zoo.
_CLIP = 31


def study(
    model: str,
    strategy: Strategy,
    *,
    nproc: int,
    frames: int,
    prompt: str,
    steps: int | None = None,
    seed: int = 0,
    later: tuple[int, str] | None = None,
) -> dict[str, Any]:
    """Streams one video and measures its memory and content.

    Args:
        model: of the zoo.
        strategy: one of those that stream.
        nproc: ranks, one thread each.
        frames: of the video.
        prompt: a caption of the model's task.
        steps: of denoising; None takes the model's own number.
        seed: of the noise.
        later: a caption that takes over, and its first frame.

    Returns:
        ``case model nproc frames steps seconds frames_per_second first_frame_seconds peak_mb quarter_mb end_mb
        facts_read identity_kept trend_colour trend_size``, and ``later_facts_read`` of the frames under the later
        caption, the others being of those before it. Megabytes are lists with a number per rank: the peak of the
        whole run, and the mean resident memory over the second quarter and over the last one.
    """
    return launch(_on_rank, nproc, model, strategy, frames, prompt, steps, seed, later)


def _on_rank(
    model: str,
    strategy: Strategy,
    frames: int,
    prompt: str,
    steps: int | None,
    seed: int,
    later: tuple[int, str] | None,
) -> dict[str, Any]:
    quiet_libraries()
    torch.set_num_threads(1)
    row, pipe = zoo.MODELS[model], zoo.load(model)
    pipe.set_progress_bar_config(disable=True)
    degrees: dict[str, Any] = mesh_for((strategy,), int(os.environ["WORLD_SIZE"]))
    with Mesh(**degrees, timeout=1800.0) as mesh, parallelize(pipe, strategy, mesh=mesh) as plan:
        call = {**row.defaults, "prompt": prompt, "num_frames": frames, "output_type": "np"}
        call["num_inference_steps"] = call["num_inference_steps"] if steps is None else steps
        call |= {} if later is None else {"prompts": {later[0]: later[1]}}
        streamed = _watch(plan, {**call, "generator": torch.Generator().manual_seed(seed)})
        gc.collect()
        fourth = max(1, len(streamed.resident) // 4)
        quarter = float(np.mean(streamed.resident[fourth : 2 * fourth]))
        end = float(np.mean(streamed.resident[-fourth:]))
        spent = gather(mesh, [max(streamed.resident), quarter, end], "end of a stream")
        if not mesh.is_main:
            return {}
        return {
            "case": repr(strategy),
            "model": model,
            "nproc": mesh.world_size,
            "steps": call["num_inference_steps"],
            "seconds": streamed.seconds,
            "first_frame_seconds": streamed.first,
            **{name: [rank[place] for rank in spent] for place, name in enumerate(("peak_mb", "quarter_mb", "end_mb"))},
            **_content(row.task, prompt, later, streamed),
        }


def _content(task: Any, prompt: str, later: tuple[int, str] | None, streamed: _Stream) -> dict[str, Any]:
    """Reads what the video shows, up to the frame of a later caption and from there on."""
    whole = np.concatenate(streamed.parts)
    video, after = (whole, whole[:0]) if later is None else np.split(whole, [later[0]])
    trend = task.trend(video)
    return {
        "frames": len(whole),
        "frames_per_second": len(whole) / streamed.seconds,
        "facts_read": task.facts_read(prompt, video),
        "identity_kept": task.identity_kept(prompt, video),
        "trend_colour": trend["colour"],
        "trend_size": trend["size"],
        "later_facts_read": None if later is None else _facts_in_clips(task, later[1], after),
    }


def _facts_in_clips(task: Any, caption: str, video: Any) -> float:
    """Reads a caption's facts in clips as long as those that the models were trained on, and returns their mean."""
    clips = [video[start : start + _CLIP] for start in range(0, len(video) - _CLIP + 1, _CLIP)]
    return float(np.mean([task.facts_read(caption, clip) for clip in clips]))


@dataclass(slots=True)
class _Stream:
    """Holds the frames of a stream as bytes, resident megabytes after each part, and how long it took."""

    parts: list[Any] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    seconds: float = 0.0
    first: float = 0.0


def _watch(plan: Plan, call: dict[str, Any]) -> _Stream:
    streamed, start, kept = _Stream(), time.perf_counter(), 0.0
    for part in stream(plan, **call):
        # Frames that are kept for the scores do not count as memory of the stream.
        streamed.resident.append(_resident() - kept)
        if part is not None:
            streamed.first = streamed.first or time.perf_counter() - start
            streamed.parts.append(np.rint(part.frames[0] * 255).astype(np.uint8))
            kept += streamed.parts[-1].nbytes / 1e6
    streamed.seconds = time.perf_counter() - start
    return streamed


def _resident() -> float:
    """Returns the resident memory of this process in megabytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / 1e6
