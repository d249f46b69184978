"""Steps a few-step model as distribution matching trains it: to a clean estimate, and back to the next noise level."""

from __future__ import annotations

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler

__all__ = ["RenoisingScheduler"]


class RenoisingScheduler(FlowMatchEulerDiscreteScheduler):
    """Spaces the noise levels evenly before the shift, 1 to 1/steps, and adds fresh noise after every clean estimate.

    Euler's own scheduler spaces them to 1/1000, so that the last of four steps does next to nothing.

    Args:
        shift: towards noise; level s becomes ``shift s / (1 + (shift - 1) s)``.

    Example:
        >>> scheduler = RenoisingScheduler(shift=5.0)
        >>> scheduler.set_timesteps(4)
        >>> [round(float(time), 1) for time in scheduler.timesteps]
        [1000.0, 937.5, 833.3, 625.0]

    Source: the sampling of Self-Forcing (arXiv 2506.08009) and DMD2 (arXiv 2405.14867).
    """

    def __init__(self, shift: float = 5.0) -> None:
        super().__init__(shift=shift, stochastic_sampling=True)

    def set_timesteps(self, num_inference_steps: int | None = None, device: Any = None, **chosen: Any) -> None:
        """Sets the noise levels, unless `sigmas` or `timesteps` are given."""
        if num_inference_steps and chosen.get("sigmas") is None and chosen.get("timesteps") is None:
            chosen["sigmas"] = [1 - step / num_inference_steps for step in range(num_inference_steps)]
        super().set_timesteps(num_inference_steps, device, **chosen)
