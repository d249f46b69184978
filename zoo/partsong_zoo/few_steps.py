"""Builds the scheduler of the zoo's few-step models. Importing this module loads torch."""

from __future__ import annotations

from diffusers import UniPCMultistepScheduler

__all__ = ["build_few_step_scheduler"]


def build_few_step_scheduler(shift: float) -> UniPCMultistepScheduler:
    """Builds a noise schedule of rectified flow whose levels are evenly spaced before the shift.

    UniPC of first order is Euler's method. Euler's own scheduler wastes the last step, one of four, below 1 %
    noise, and the one for latent consistency models does the same.

    Args:
        shift: towards noise; level s becomes ``shift s / (1 + (shift - 1) s)``.

    Example:
        >>> scheduler = build_few_step_scheduler(3.0)
        >>> scheduler.set_timesteps(2)
        >>> [round(float(sigma), 2) for sigma in scheduler.sigmas]
        [1.0, 0.75, 0.0]
    """
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift,
        solver_order=1,
        disable_corrector=list(range(100)),
    )
