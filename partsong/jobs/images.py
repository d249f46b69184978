"""Runs a job of ``partsong image``: loads a pipeline on every rank, samples, compares and writes the images."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from partsong import zoo
from partsong.errors import ArgumentError, PartsongError, UnsupportedError
from partsong.garbage import collect_again
from partsong.jobs.compare import ComparedRun, Images, drift, finite, parallel_run, serial_run
from partsong.jobs.loading import open_plan
from partsong.jobs.pipelines import SamplingJob, open_mesh, open_pipeline, picture_arguments, pipeline_class
from partsong.outputs import save_images, size_note
from partsong.parallel import Plan
from partsong.samplers.generate import check_arguments, generate
from partsong.seeds import generators

__all__ = ["ImageJob", "check_image_call", "draw_images", "facts_read", "run_image"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageJob(SamplingJob):
    """Says which images to sample; image i draws its noise from the seed and its number.

    Attributes:
        num_images: how many images of the prompt.
    """

    num_images: int = 1


def run_image(job: ImageJob) -> dict[str, Any]:
    """Samples a job on this rank; rank 0 writes the images.

    Returns:
        On rank 0 the measured values by their JSON names; an empty dictionary elsewhere.

    Raises:
        ArgumentError: the folder cannot be read, or the pipeline has no such argument or refuses its value.
        UnsupportedError: the pipeline makes no images.
        NotANumberError: an image holds a NaN.
    """
    job.prepare_process()
    check_image_call(job)
    collect_again()
    with open_mesh(job) as mesh:
        pipe = open_pipeline(job, mesh) if job.compare else None

        def draw(target: Any, steps: int | None) -> Images:
            return draw_images(job, target, steps)

        serial = None if pipe is None else serial_run(pipe, mesh, draw)
        run = parallel_run(open_plan(job, mesh, pipe), draw, warm_up=job.compare, ledger=job.ledger)
        return _report(job, run, serial) | {"shares": mesh.shares} if mesh.is_main else {}


def facts_read(name: str | None, prompt: str, images: Images) -> float | None:
    """Returns the share of a caption's facts that the images show; None if no reader can parse the caption."""
    if name is None:
        return None
    shares = [zoo.MODELS[name].task.facts_read(prompt, image) for image in images]
    known = [share for share in shares if share is not None]
    return float(np.mean(known)) if known else None


def check_image_call(job: ImageJob) -> None:
    """Checks that the pipeline makes images of prompts or classes, and has the arguments of the call.

    Raises:
        ArgumentError: the pipeline has no such argument.
        UnsupportedError: it makes no images, or takes no prompt.
    """
    pipeline = pipeline_class(job.pipeline)
    known = inspect.signature(pipeline.__call__).parameters
    if "num_frames" in known:
        raise UnsupportedError(f"{job.pipeline} makes videos, not images; use partsong video")
    if "prompt" not in known and "class_labels" not in known:
        raise UnsupportedError(f"{job.pipeline} takes no prompt; partsong image samples text-to-image pipelines")
    check_arguments(pipeline, job.arguments)


def draw_images(job: ImageJob, target: Any, steps: int | None = None) -> Images:
    """Samples the images of a job.

    Args:
        job: what to sample.
        target: a plan, all of whose ranks call this, or a pipeline.
        steps: at most so many, for a call that warms up.

    Returns:
        Images `[N, H, W, 3]` in [0, 1].

    Raises:
        ArgumentError: the pipeline refuses the value of an argument.
        NotANumberError: an image holds a NaN.
    """
    arguments = dict(job.arguments)
    if steps is not None:
        arguments["num_inference_steps"] = min(steps, arguments.get("num_inference_steps", steps))
    seeded = generators(job.seed, job.num_images, first=job.first)
    arguments = picture_arguments(arguments, job.prompt, job.num_images, seeded)
    try:
        if isinstance(target, Plan):
            return finite(np.asarray(generate(target, **arguments, output_type="np").images))
        return finite(np.asarray(target(**arguments, output_type="np").images))
    except PartsongError:
        raise
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{job.pipeline} refused the call: {error}") from error


def _report(job: ImageJob, run: ComparedRun, serial: ComparedRun | None) -> dict[str, Any]:
    paths = save_images(list(run.images), job.out)
    height, width = run.images.shape[1:3]
    values: dict[str, Any] = {
        "seconds": run.seconds,
        "out": paths[0],
        "images": paths,
        "height": height,
        "width": width,
        "size_note": size_note(job.arguments, height, width),
        "class": run.kind,
        "psnr_to_serial": None,
        "max_abs_diff": None,
        "facts_read": facts_read(job.zoo_name, str(job.prompt), run.images),
        "bytes_sent": run.bytes_sent,
        "seconds_waiting": run.seconds_waiting,
        "threads": torch.get_num_threads(),
        "explanation": run.explanation,
    }
    if serial is not None:
        values |= drift(run.images, serial.images).as_json(run.seconds, serial.seconds)
        values["facts_read_serial"] = facts_read(job.zoo_name, str(job.prompt), serial.images)
    return values
