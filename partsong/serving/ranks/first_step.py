"""Makes one step with a model when its ranks start, which warms it up and shows how its pipeline calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from partsong.errors import PartsongError
from partsong.parallel.hooks.replaced_method import Method, replace_method
from partsong.serving.messages import JobWork
from partsong.serving.ranks.paused_job import PausedJob
from partsong.serving.ranks.served_model import ServedModel

__all__ = ["FirstStep", "first_step"]


@dataclass(slots=True)
class FirstStep:
    """Says how a pipeline called its denoiser in a step with the model's defaults.

    Attributes:
        calls: how often.
        arguments: of the first call; None where the step failed.
        encoded: what the pipeline's ``encode_prompt`` returned; None where it has no such method.
    """

    calls: int = 2
    arguments: dict[str, Any] | None = None
    encoded: Any = None


def first_step(model: ServedModel) -> FirstStep:
    """Makes one step; where the pipeline needs more than a prompt, what is returned says so."""
    seen = FirstStep(calls=0)
    work = JobWork(id="warm-up", prompt="a", arguments={**model.defaults, "num_inference_steps": 1}, out=())

    def noting(encode: Method) -> Method:
        def encode_and_note(*args: Any, **kwargs: Any) -> Any:
            seen.encoded = encode(*args, **kwargs)
            return seen.encoded

        return encode_and_note

    try:
        job = PausedJob(model, work, decodes=False)
        if hasattr(job.pipe, "encode_prompt"):
            replace_method(job.pipe, "encode_prompt", noting)
        job.begin()
        while not job.is_done:
            seen.arguments = job.arguments if seen.arguments is None else seen.arguments
            with torch.no_grad():
                output = model.denoiser(**job.arguments)
            seen.calls += 1
            job.answer(output)
    except PartsongError:  # the pipeline needs more than a prompt
        return FirstStep()
    return seen
