"""Samples a few fixed captions serially and with each strategy, for the demo page.

All methods make the same call: all captions in one batch, with the same noise. They are timed in turn, so that a busy
moment of the machine affects them all, and the median of the turns counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partsong import zoo
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.compare import ComparedRun, Images, drift, parallel_run, serial_run
from partsong.jobs.pipelines import RANK_TIMEOUT, read_pipeline
from partsong.model_folders import read_settings
from partsong.parallel import Mesh, Plan, mesh_for, parallelize
from partsong.samplers import generate
from partsong.samplers.registry import parse_strategy
from partsong.seeds import generators

__all__ = ["CAPTIONS", "DemoJob", "Method", "methods_for", "run_demo"]

CAPTIONS = (
    "a red circle left of a blue square",
    "a large yellow triangle above a small green circle",
    "a purple cross at the top left and a black square at the bottom right",
    "a green triangle right of a red cross",
    "a blue circle, a yellow square and a red triangle",
    "a small black circle below a large purple square",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoJob:
    """Says what to sample.

    Attributes:
        model: a zoo model of images.
        captions: one for each image.
        methods: strategies as on the command line, several joined by ``+``.
        nproc: number of ranks.
        seed: image i draws its noise from the seed and i.
        steps: denoising steps; None takes the model's default.
        repeats: timed calls of each method.
        threads: threads per rank, and of the serial twin.
    """

    model: str = "shapes"
    captions: tuple[str, ...] = CAPTIONS
    methods: tuple[str, ...]
    nproc: int
    seed: int = 7
    steps: int | None = None
    repeats: int = 3
    threads: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """Holds the measurements of one sampling method.

    Attributes:
        name: as on the command line, or ``serial``.
        kind: ``exact``, ``bounded`` or ``approximate``.
        images: `[N, H, W, 3]`, 8 bits.
        facts: for each image, the facts of its caption and whether the image shows them.
        psnr: to the serial images in dB, median over images; infinite when equal.
        psnr_worst: the same for the image that is furthest away.
        max_abs_diff: to the serial images, in [0, 1].
        seconds: of one call for all captions, median over repeats.
        speedup: the serial seconds divided by these.
        bytes_sent: by each rank in one call.
        waiting: share of the call that the slowest rank waited for messages.
    """

    name: str
    kind: str
    images: NDArray[np.uint8]
    facts: tuple[dict[str, bool], ...]
    psnr: float
    psnr_worst: float
    max_abs_diff: float
    seconds: float
    speedup: float
    bytes_sent: tuple[int, ...]
    waiting: float


def methods_for(nproc: int) -> tuple[str, ...]:
    """Names the methods that fit a number of ranks, beginning with those that exchange the least."""
    sequence = ("ulysses", "ring", "displaced-patch")
    guidance = ("cfg-parallel",) if nproc == 2 else ("cfg-parallel+ulysses",) if nproc % 2 == 0 else ()
    return (*guidance, "data-parallel", *sequence)


def run_demo(job: DemoJob) -> list[Method]:
    """Samples with each method and measures it, on this rank.

    Returns:
        On rank 0 the serial twin and then each method; an empty list elsewhere.
    """
    torch.set_num_threads(job.threads)
    quiet_libraries()
    with ExitStack() as open_meshes:
        meshes = {name: _mesh(name, job.nproc) for name in job.methods}
        for mesh in meshes.values():
            open_meshes.enter_context(mesh)
        first = next(iter(meshes.values()))
        folder = zoo.MODELS[job.model].folder
        pipe = read_pipeline(folder, read_settings(folder, "model_index.json")["_class_name"]).to(first.device)
        pipe.set_progress_bar_config(disable=True)
        runs: dict[str, list[ComparedRun]] = {name: [] for name in ("serial", *meshes)}

        def draw(target: Any, steps: int | None) -> Images:
            return _draw(job, target, steps)

        for repeat in range(job.repeats):
            serial = serial_run(pipe, first, draw, warm_up=repeat == 0)
            runs["serial"] += [serial] if serial is not None else []
            for name, mesh in meshes.items():
                strategies = [parse_strategy(part) for part in name.split("+")]
                plan = parallelize(pipe, *strategies, mesh=mesh)
                runs[name].append(parallel_run(plan, draw, warm_up=repeat == 0))
        return [_method(job, name, each, runs["serial"]) for name, each in runs.items()] if first.is_main else []


def _mesh(name: str, nproc: int) -> Mesh:
    return Mesh(**mesh_for([parse_strategy(part) for part in name.split("+")], nproc), timeout=RANK_TIMEOUT)


def _draw(job: DemoJob, target: Any, steps: int | None) -> Images:
    arguments: dict[str, Any] = dict(zoo.MODELS[job.model].defaults)
    if job.steps is not None:
        arguments["num_inference_steps"] = job.steps
    if steps is not None:
        arguments["num_inference_steps"] = min(steps, arguments["num_inference_steps"])
    arguments |= {"prompt": list(job.captions), "generator": generators(job.seed, len(job.captions))}
    if isinstance(target, Plan):
        return np.asarray(generate(target, **arguments, output_type="np").images)
    return np.asarray(target(**arguments, output_type="np").images)


def _method(job: DemoJob, name: str, runs: Sequence[ComparedRun], serial: Sequence[ComparedRun]) -> Method:
    images, seconds = runs[-1].images, statistics.median(run.seconds for run in runs)
    task = zoo.MODELS[job.model].task
    apart = drift(images, serial[-1].images)
    return Method(
        name=name,
        kind=runs[-1].kind,
        images=np.rint(images.clip(0.0, 1.0) * 255.0).astype(np.uint8),
        facts=tuple(task.facts(caption, image) for caption, image in zip(job.captions, images, strict=True)),
        psnr=apart.psnr,
        psnr_worst=apart.psnr_worst,
        max_abs_diff=apart.max_abs_diff,
        seconds=seconds,
        speedup=statistics.median(run.seconds for run in serial) / seconds,
        bytes_sent=runs[-1].bytes_sent,
        waiting=max(statistics.median(run.seconds_waiting[r] for run in runs) for r in range(job.nproc)) / seconds,
    )
