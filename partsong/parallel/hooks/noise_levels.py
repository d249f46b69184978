"""Says how much of a model's input is noise at a timestep, by its scheduler."""

from __future__ import annotations

import math
from typing import Any

from partsong.errors import UnsupportedError

__all__ = ["NoiseLevels", "noise_ratios"]


class NoiseLevels:
    """Knows the shares of the clean sample and of unit noise in a model's input.

    Args:
        scheduler: of a diffusers pipeline; only its configuration is read.

    Attributes:
        is_flow: whether the two shares add up to 1, as in flow matching.

    Raises:
        UnsupportedError: it does not say how much noise there is at a timestep.

    Example:
        >>> from diffusers import FlowMatchEulerDiscreteScheduler
        >>> NoiseLevels(FlowMatchEulerDiscreteScheduler()).at(250.0)
        (0.75, 0.25)
    """

    def __init__(self, scheduler: Any) -> None:
        name, predicts = type(scheduler).__name__, scheduler.config.get("prediction_type")
        self.is_flow = name.startswith("FlowMatch") or predicts == "flow_prediction"
        cumulative = getattr(scheduler, "alphas_cumprod", None)
        self._cumulative = None if cumulative is None else cumulative.tolist()
        self._num_times = scheduler.config.get("num_train_timesteps")
        if self._num_times is None or (not self.is_flow and self._cumulative is None):
            raise UnsupportedError(
                f"{name}: it does not say how much noise there is at a timestep (prediction_type={predicts!r}); use "
                "DDIM, DPM-Solver, Euler or flow matching"
            )

    def at(self, timestep: float) -> tuple[float, float]:
        """Returns the shares of the clean sample and of the noise at a timestep."""
        if self.is_flow:
            level = timestep / self._num_times
            return 1 - level, level
        assert self._cumulative is not None
        # Schedulers with noise levels of their own call the model between two of its timesteps.
        low = min(max(math.floor(timestep), 0), self._num_times - 1)
        high = min(low + 1, self._num_times - 1)
        ratios = [_log_ratio(self._cumulative[index]) for index in (low, high)]
        ratio = math.exp(ratios[0] + (timestep - low) * (ratios[1] - ratios[0]))
        return 1 / math.hypot(1, ratio), ratio / math.hypot(1, ratio)


def noise_ratios(scheduler: Any, timesteps: list[float], sigmas: list[float] | None) -> list[float] | None:
    """Returns noise over clean sample in every step; None where a scheduler does not say.

    Args:
        scheduler: of a diffusers pipeline.
        timesteps: those of the steps.
        sigmas: its own noise levels, of which the timesteps may be rounded; None where it has none.
    """
    try:
        levels = NoiseLevels(scheduler)
    except UnsupportedError:
        return None
    if sigmas is not None and len(sigmas) >= len(timesteps):
        shares = [(1 - sigma if levels.is_flow else 1.0, sigma) for sigma in sigmas[: len(timesteps)]]
    else:
        shares = [levels.at(timestep) for timestep in timesteps]
    return [noise / signal if signal > 0 else math.inf for signal, noise in shares]


def _log_ratio(cumulative: float) -> float:
    """Returns the logarithm of noise over signal; a last timestep of pure noise counts as almost pure."""
    kept = max(cumulative, 2.0**-24)
    return 0.5 * math.log((1 - kept) / kept)
