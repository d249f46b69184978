"""Holds a solver's step as a row of factors, which solvers in time compare and shorten."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["StepRule"]


@dataclass(frozen=True, slots=True)
class StepRule:
    """Describes one step of a solver: ``x' = keep * x + output * F + before * F_before + noise * z``.

    Euler steps of a flow keep 1 and add the difference of the noise levels; DDIM, DDPM and ancestral steps have this
    form, and so has DPM-Solver++ of second order, with the output of the previous step.

    Attributes:
        keep: factor of the point.
        output: factor of the model's output there.
        noise: factor of the step's noise.
        before: factor of the output of the previous step.
    """

    keep: float
    output: float
    noise: float = 0.0
    before: float = 0.0

    def __call__(
        self, point: Tensor, output: Tensor, carried: Tensor | None, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Takes the step; it carries its output."""
        new = self.keep * point + self.output * output
        if self.before:
            assert carried is not None
            new = new + self.before * carried
        return new if noise is None or not self.noise else new + self.noise * noise, output
