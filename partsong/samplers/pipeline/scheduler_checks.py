"""Tests on random numbers whether a scheduler's step looks across positions, or back at earlier steps."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor

from partsong.accelerator import forked_random
from partsong.errors import UnsupportedError

__all__ = ["check_memoryless", "check_positionwise"]

_SIDE = 8


def check_positionwise(scheduler: Any, ndim: int) -> None:
    """Refuses a scheduler in whose steps one position of the latents depends on another.

    A copy of the scheduler makes all its steps on random latents, twice. The second time half of the positions hold
    other numbers, and the result of the other half must not change by a bit. Dynamic thresholding fails this check, as
    does any step that takes a norm or a quantile of the picture.

    Args:
        scheduler: as the pipeline has set it up, its timesteps included; left as it is.
        ndim: dimensions of the latents: 3 for `[B, L, C]`, otherwise `[B, C, ...]`.

    Raises:
        UnsupportedError: names the scheduler and says why.

    Example:
        >>> from diffusers import DDIMScheduler
        >>> scheduler = DDIMScheduler()
        >>> scheduler.set_timesteps(4)
        >>> check_positionwise(scheduler, ndim=4)
    """
    draw = torch.Generator().manual_seed(0)
    shape = (1, _SIDE, 4) if ndim == 3 else (1, 4, *[_SIDE] * (ndim - 2))
    is_kept = torch.rand((1, _SIDE, 1) if ndim == 3 else (1, 1, *shape[2:]), generator=draw) < 0.5
    times = scheduler.timesteps[getattr(scheduler, "begin_index", None) or 0 :]
    is_kept = is_kept.to(times.device)
    tensors = [torch.randn(shape, generator=draw).to(times.device) for _ in range(len(times) + 1)]
    # Far larger numbers elsewhere: a threshold or a norm that reads them must move.
    others = [torch.where(is_kept, x, 50 * x + 7) for x in tensors]
    name = type(scheduler).__name__
    try:
        before, after = (torch.where(is_kept, _after_all_steps(scheduler, times, x), 0) for x in (tensors, others))
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise UnsupportedError(
            f"{name}: it could not be shown that its step treats every position by itself ({error}); use a scheduler "
            "such as DDIM, DPM-Solver, Euler or flow matching, or a strategy other than PatchPipeline"
        ) from error
    if not torch.equal(before.nan_to_num(), after.nan_to_num()):
        raise UnsupportedError(
            f"{name}: in its step, one position of the latents depends on the others (as in dynamic thresholding), so "
            "patches cannot be stepped one after another; switch that off, use another scheduler, or a strategy other "
            "than PatchPipeline"
        )


def check_memoryless(scheduler: Any, latents: Tensor) -> None:
    """Refuses a scheduler that remembers earlier steps, by making the same step after two different histories.

    Args:
        scheduler: set to its timesteps; left as it is.
        latents: of the shape and type it steps.

    Raises:
        UnsupportedError: a step depends on those before it.
    """
    times = scheduler.timesteps[: min(4, len(scheduler.timesteps))]
    for last in range(1, len(times)):
        results = [_step_after(scheduler, times[: last + 1], latents, past) for past in (1, 2)]
        if not torch.equal(*results):
            raise UnsupportedError(
                f"{type(scheduler).__name__} remembers earlier steps, which other ranks make; use a scheduler of one "
                "step, such as FlowMatchEulerDiscreteScheduler or LCMScheduler"
            )


def _after_all_steps(scheduler: Any, times: Tensor, tensors: list[Tensor]) -> Tensor:
    """Returns the latents after all steps; `tensors` are the first latents and then each step's prediction."""
    copied = copy.deepcopy(scheduler)
    draw = torch.Generator().manual_seed(1)
    latents, *predictions = tensors
    with forked_random(times.device), torch.no_grad():
        torch.manual_seed(2)  # some draw their noise from the default generator
        for time, prediction in zip(times, predictions, strict=True):
            if hasattr(copied, "scale_model_input"):
                copied.scale_model_input(latents, time)  # some refuse a step before this call
            latents = _step(copied, prediction, time, latents, draw)
    return latents


def _step_after(scheduler: Any, times: Tensor, latents: Tensor, past: int) -> Tensor:
    """Returns the result of the last of some steps; earlier steps get numbers that depend on `past`."""
    copied = copy.deepcopy(scheduler)
    for number, time in enumerate(times):
        is_last = number == len(times) - 1
        draw = torch.Generator().manual_seed(3 if is_last else 10 * past + number)
        prediction, sample = (torch.randn(latents.shape, generator=draw).to(latents) for _ in range(2))
        result = _step(copied, prediction, time, sample, draw)
    return result


def _step(scheduler: Any, prediction: Tensor, time: Any, sample: Tensor, draw: torch.Generator) -> Tensor:
    takes_generator = "generator" in inspect.signature(scheduler.step).parameters
    random = {"generator": draw} if takes_generator else {}
    return scheduler.step(prediction, time, sample, return_dict=False, **random)[0]
