"""Whether a scheduler's step depends on nothing but its sample, prediction and timestep."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError

__all__ = ["check_memoryless"]


def check_memoryless(scheduler: Any, latents: Tensor) -> None:
    """Refuses a scheduler that remembers earlier steps, by making steps after different pasts and comparing.

    Args:
        scheduler: set to its timesteps; left as it is.
        latents: of the shape and type it steps.

    Raises:
        UnsupportedError: a step that depends on those before it.
    """
    times = scheduler.timesteps[: min(4, len(scheduler.timesteps))]
    for last in range(1, len(times)):
        results = [_step_after(scheduler, times[: last + 1], latents, past) for past in (1, 2)]
        if not torch.equal(*results):
            raise UnsupportedError(
                f"{type(scheduler).__name__} remembers earlier steps, which other ranks make; use a scheduler of one "
                "step, such as FlowMatchEulerDiscreteScheduler or LCMScheduler"
            )


def _step_after(scheduler: Any, times: Tensor, latents: Tensor, past: int) -> Tensor:
    twin = copy.deepcopy(scheduler)
    vars(twin).pop("step", None)  # a paused call puts its own there
    takes = inspect.signature(type(twin).step).parameters
    for number, time in enumerate(times):
        is_last = number == len(times) - 1
        draw = torch.Generator().manual_seed(3 if is_last else 10 * past + number)
        prediction, sample = (torch.randn(latents.shape, generator=draw).to(latents) for _ in range(2))
        extra = {"generator": draw} if "generator" in takes else {}
        result = type(twin).step(twin, prediction, time, sample, return_dict=False, **extra)[0]
    return result
