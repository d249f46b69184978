"""Samples in few steps with a consistency model: a clean estimate, noised again with less and less noise.

On the trigonometric path latents at time t are ``cos(t) clean + sin(t) noise``, from 0 (clean) to half of pi. Those of
rectified flow are the same up to scale, at noise level ``sin(t) / (cos(t) + sin(t))``, so one schedule serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor

from partsong.errors import ArgumentError

__all__ = ["consistency", "flow_estimate", "flow_sigmas", "trigflow_times"]

#: The times between pure noise and the clean sample that rCM's few-step models were trained for.
_BETWEEN = (1.5, 1.4, 1.0)


def trigflow_times(num_steps: int, *, sigma_max: float = 80.0, between: Sequence[float] | None = None) -> list[float]:
    """Lists the times of a few-step consistency model, falling, the last of them 0.

    Args:
        num_steps: calls of the model.
        sigma_max: ratio of noise to signal at the first time, ``tan(t)``.
        between: the other times, `num_steps` - 1 of them, falling; None takes rCM's 1.5, 1.4 and 1.0, as many as are
            needed, and beyond four steps times that divide the rest evenly.

    Returns:
        `num_steps` + 1 times.

    Raises:
        ArgumentError: there is no step, or the times do not fall.

    Source: TrigFlow, arXiv 2410.11081; rCM, arXiv 2510.08431.

    Example:
        >>> trigflow_times(2)
        [1.5582969777755349, 1.5, 0.0]
    """
    if num_steps < 1:
        raise ArgumentError(f"num_steps={num_steps}; use 1 or more")
    if between is None:
        more = max(0, num_steps - 1 - len(_BETWEEN))
        tail = [_BETWEEN[-1] * (1 - (i + 1) / (more + 1)) for i in range(more)]
        between = (*_BETWEEN[: num_steps - 1], *tail)
    times = [math.atan(sigma_max), *between, 0.0]
    if len(between) != num_steps - 1:
        raise ArgumentError(f"{len(between)} times between the first and 0 for {num_steps} steps; give {num_steps - 1}")
    if not all(later < earlier for earlier, later in pairwise(times)):
        raise ArgumentError(f"times {times} do not fall from below pi / 2 to 0; give others between")
    return times


def flow_sigmas(times: Sequence[float]) -> list[float]:
    """Returns rectified flow's noise levels at some times; without the last, 0, they are a pipeline's ``sigmas``.

    Example:
        >>> flow_sigmas([math.pi / 4, 0.0])
        [0.5, 0.0]
    """
    return [round(math.sin(t) / (math.cos(t) + math.sin(t)), 15) for t in times]


def flow_estimate(velocity: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, float], Tensor]:
    """Turns a model of rectified flow into the clean estimate that `consistency` needs.

    Args:
        velocity: maps latents and noise level to ``noise - clean``.
    """

    def estimate(latents: Tensor, time: float) -> Tensor:
        size = math.cos(time) + math.sin(time)
        sigma = math.sin(time) / size
        return latents / size - sigma * velocity(latents / size, sigma)

    return estimate


def consistency(
    estimate: Callable[[Tensor, float], Tensor], noise: Callable[[int], Tensor], times: Sequence[float]
) -> Tensor:
    """Samples with a consistency model: at every time a clean estimate, then fresh noise for the next time.

    Args:
        estimate: maps latents and time to clean latents.
        noise: maps a step number to standard normal noise of the latents' shape; sampling starts from step 0's.
        times: falling, the last one 0; see `trigflow_times`.

    Returns:
        Clean latents.

    Raises:
        ArgumentError: the times do not fall to 0.

    Source: consistency models, arXiv 2303.01469; on the trigonometric path arXiv 2410.11081.

    Example:
        >>> import torch
        >>> consistency(lambda x, t: x.sign(), lambda step: torch.tensor([-0.3, 2.0]), trigflow_times(1))
        tensor([-1.,  1.])
    """
    if len(times) < 2 or times[-1] != 0 or not all(later < earlier for earlier, later in pairwise(times)):
        raise ArgumentError(f"times {list(times)}; give two or more that fall to 0, such as trigflow_times(4)")
    latents = math.sin(times[0]) * noise(0)
    clean = latents
    for step, (time, after) in enumerate(pairwise(times)):
        clean = estimate(latents, time)
        if after > 0:
            latents = math.cos(after) * clean + math.sin(after) * noise(step + 1)
    return clean
