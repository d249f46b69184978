"""Runs a job of ``partsong video``: loads a pipeline on every rank, samples, writes frames as they are done."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from partsong import zoo
from partsong.accelerator import is_on_host
from partsong.errors import UnsupportedError
from partsong.garbage import collect_again
from partsong.jobs.compare import WARM_UP_STEPS, drift, gather
from partsong.jobs.loading import open_plan
from partsong.jobs.pipelines import SamplingJob, open_mesh, open_pipeline, pipeline_class
from partsong.jobs.video_run import VideoRun, sample_video
from partsong.ledger import Ledger
from partsong.outputs import size_note
from partsong.parallel import Mesh, Plan, Strategy, parallelize
from partsong.samplers.generate import check_arguments
from partsong.samplers.long_video.frame_counts import frames_to_sample
from partsong.seeds import generators
from partsong.videos import VideoWriter

__all__ = ["VideoJob", "check_video_call", "draw_video", "enough_frames", "on_one_rank", "run_video"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoJob(SamplingJob):
    """Says which video to sample.

    Attributes:
        fps: frames per second of the video.
        num_frames: how many frames to deliver; more are sampled where the model cannot make this number. None delivers
            what the pipeline makes by default.
        journal: folder for the progress of the run, from which it can be continued.
    """

    fps: float = 16.0
    num_frames: int | None = None
    journal: Path | None = None


def run_video(job: VideoJob) -> dict[str, Any]:
    """Samples a job on this rank; rank 0 writes the video.

    Returns:
        On rank 0 the measured values by their JSON names; an empty dictionary elsewhere.

    Raises:
        ArgumentError: the folder cannot be read, or the pipeline has no such argument or refuses its value.
        UnsupportedError: the pipeline makes no videos.
        OutputError: the video cannot be written to its end; the part that was written can be played.
    """
    job.prepare_process()
    check_video_call(job)
    collect_again()
    with open_mesh(job) as mesh:
        pipe = open_pipeline(job, mesh) if job.compare else None
        keeps = job.compare or job.zoo_name is not None
        serial = None if pipe is None else _serial(enough_frames(job, pipe), pipe, mesh)
        with open_plan(job, mesh, pipe) as plan:
            job = enough_frames(job, plan.target)
            if job.compare:
                draw_video(replace(job, journal=None), plan, steps=WARM_UP_STEPS, keeps=False)
            gather(mesh, [0.0], "start of the timed run")
            writer = VideoWriter(job.out, fps=job.fps) if mesh.is_main else None
            with Ledger(job.ledger) as records:
                run = draw_video(job, plan, writer, keeps=keeps and mesh.is_main)
            spent = records.summary()
            row = [run.seconds, spent["bytes_sent"], spent["seconds_waiting"], _peak_memory(mesh.device)]
            rows = gather(mesh, row, "end of the timed run")
            return _report(job, plan, run, rows, serial) if mesh.is_main else {}


def _peak_memory(device: torch.device) -> float:
    """Returns the most memory that was used so far, in MiB: of the accelerator, or of this process."""
    if not is_on_host(device):
        return torch.accelerator.max_memory_allocated(device) / 2**20
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset / 2**20
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 2**10)


def _serial(job: VideoJob, pipe: Any, mesh: Mesh) -> VideoRun | None:
    """Samples the same video on rank 0, with the pipeline itself or with the same loop, while the other ranks wait."""
    run = None
    if mesh.is_main:
        twins = on_one_rank(job.strategies)
        if twins:
            with parallelize(pipe, *twins, mesh=mesh.alone()) as plan:
                run = draw_video(replace(job, journal=None), plan)
        else:
            run = draw_video(job, pipe)
    gather(mesh, [0.0], "wait for the serial twin")
    return run


def on_one_rank(strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns those strategies whose loop a serial twin runs too, with the knobs that fit one rank."""
    known = {"degree": 1, "pipe_degree": 1, "layers": None}
    twins = [strategy for strategy in strategies if strategy.loops_alone]
    knobs = [{knob.name: known[knob.name] for knob in fields(twin) if knob.name in known} for twin in twins]
    return tuple(replace(twin, **given) for twin, given in zip(twins, knobs, strict=True))


def enough_frames(job: VideoJob, pipe: Any) -> VideoJob:
    """Asks the pipeline for a number of frames that it can make, at least as many as are wanted."""
    if job.num_frames is None:
        return job
    in_blocks = any(strategy.has_loop for strategy in job.strategies)
    sampled = frames_to_sample(pipe, job.num_frames, in_blocks=in_blocks)
    return replace(job, arguments={**job.arguments, "num_frames": sampled})


def check_video_call(job: VideoJob) -> None:
    """Checks that the pipeline makes videos of prompts, and has the arguments of the call.

    Raises:
        ArgumentError: the pipeline has no such argument.
        UnsupportedError: it makes no videos, or takes no prompt.
    """
    pipeline = pipeline_class(job.pipeline)
    known = inspect.signature(pipeline.__call__).parameters
    if "num_frames" not in known or "prompt" not in known:
        raise UnsupportedError(f"{job.pipeline} takes no prompt and num_frames; partsong video samples text to video")
    check_arguments(pipeline, job.arguments)


def draw_video(
    job: VideoJob, target: Any, writer: VideoWriter | None = None, *, steps: int | None = None, keeps: bool = True
) -> VideoRun:
    """Samples the video of a job.

    Args:
        job: what to sample.
        target: a plan, all of whose ranks call this, or a pipeline.
        writer: takes the frames as they come.
        steps: at most so many, for a call that warms up.
        keeps: whether to keep the frames.

    Raises:
        ArgumentError: the pipeline refuses the value of an argument.
        NotANumberError: a frame holds a NaN.
    """
    seeded = generators(job.seed, 1, first=job.first)[0]
    arguments = {**job.arguments, "prompt": job.prompt, "generator": seeded}
    if steps is not None:
        arguments["num_inference_steps"] = min(steps, arguments.get("num_inference_steps", steps))
    frames = {"num_frames": job.num_frames, "keeps": keeps}
    return sample_video(target, arguments, journal=job.journal, writer=writer, **frames)


def _report(
    job: VideoJob, plan: Plan, run: VideoRun, rows: list[list[float]], serial: VideoRun | None
) -> dict[str, Any]:
    seconds = max(row[0] for row in rows)
    values: dict[str, Any] = {
        "seconds": seconds,
        "out": job.out,
        "class": plan.kind,
        "height": run.size[0],
        "width": run.size[1],
        "size_note": size_note(job.arguments, *run.size),
        "frames": run.num_frames,
        "frames_cut": run.num_cut,
        "frames_per_second": run.num_frames / seconds,
        "first_frame_seconds": run.first,
        "bytes_sent": [int(row[1]) for row in rows],
        "seconds_waiting": [row[2] for row in rows],
        "peak_memory_mb": [row[3] for row in rows],
        "shares": plan.mesh.shares,
        "threads": torch.get_num_threads(),
        "explanation": str(plan.explain()) if any(d.seen.known for d in plan.denoisers) else "",
        **_scores(job, run),
    }
    if serial is not None:
        apart = drift(np.concatenate(run.frames), np.concatenate(serial.frames))
        values |= apart.as_json(seconds, serial.seconds)
        values["facts_read_serial"] = _scores(job, serial)["facts_read"]
    return values


def _scores(job: VideoJob, run: VideoRun) -> dict[str, Any]:
    """Scores the video with the reader of a zoo model; None for each score if no reader can parse the prompt."""
    scores: dict[str, Any] = dict.fromkeys(("facts_read", "identity_kept", "border_jump_ratio"))
    if job.zoo_name is None:
        return scores
    task, frames = zoo.MODELS[job.zoo_name].task, np.concatenate(run.frames)
    scores["facts_read"] = task.facts_read(job.prompt, frames)
    if scores["facts_read"] is not None:
        scores["identity_kept"] = task.identity_kept(job.prompt, frames)
        scores["border_jump_ratio"] = task.border_jumps(frames, run.borders).ratio if run.borders else None
    return scores
