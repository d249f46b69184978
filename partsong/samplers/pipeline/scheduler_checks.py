"""Does a scheduler treat every position of the latents by itself? Asked of the scheduler's own code, with numbers."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError

__all__ = ["check_positionwise"]

_SIDE = 8


def check_positionwise(scheduler: Any, ndim: int, dtype: torch.dtype = torch.float32) -> None:
    """Refuses a scheduler in whose steps one position of the latents depends on another.

    A copy of the scheduler makes all its steps on random latents, twice; the second time half of the positions hold
    other numbers. What the other half becomes must not change by a bit. Dynamic thresholding fails it, and so does
    anything that takes a norm or a quantile of the picture.

    Args:
        scheduler: as the pipeline has set it up, its timesteps included; left as it is.
        ndim: dimensions of the latents: 3 for `[B, L, C]`, otherwise `[B, C, ...]`.
        dtype: their type.

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
    kept = torch.rand((1, _SIDE, 1) if ndim == 3 else (1, 1, *shape[2:]), generator=draw) < 0.5
    times = scheduler.timesteps[getattr(scheduler, "begin_index", None) or 0 :]
    kept = kept.to(times.device)
    steps = [torch.randn(shape, generator=draw).to(times.device, dtype) for _ in range(len(times) + 1)]
    # Far larger numbers elsewhere: a threshold or a norm that reads them must move.
    others = [torch.where(kept, x, 50 * x + 7) for x in steps]
    name = type(scheduler).__name__
    try:
        want, got = _run(scheduler, times, steps), _run(scheduler, times, others)
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise UnsupportedError(
            f"{name}: it could not be shown that its step treats every position by itself ({error}); use a scheduler "
            "such as DDIM, DPM-Solver, Euler or flow matching, or a strategy other than PatchPipeline"
        ) from error
    if not torch.equal(torch.where(kept, want, 0).nan_to_num(), torch.where(kept, got, 0).nan_to_num()):
        raise UnsupportedError(
            f"{name}: in its step, one position of the latents depends on the others (as in dynamic thresholding), so "
            "patches cannot be stepped one after another; switch that off, use another scheduler, or a strategy other "
            "than PatchPipeline"
        )


def _run(scheduler: Any, times: Any, tensors: list[Tensor]) -> Tensor:
    """The latents after all steps, with `tensors` the first latents and then each step's prediction."""
    own = copy.deepcopy(scheduler)
    vars(own).pop("step", None)  # the class' own, not one that pauses
    more: dict[str, Any] = {"return_dict": False}
    if "generator" in inspect.signature(own.step).parameters:
        more["generator"] = torch.Generator().manual_seed(1)
    latents, *predictions = tensors
    scale = getattr(own, "scale_model_input", None)
    with torch.random.fork_rng([times.device] if times.is_cuda else []), torch.no_grad():
        torch.manual_seed(2)  # some draw their noise from the default generator
        for time, prediction in zip(times, predictions, strict=True):
            if scale is not None:
                scale(latents, time)  # some want to have been asked
            latents = own.step(prediction, time, latents, **more)[0]
    return latents
