"""Computes the clean sample from a model's prediction of noise, velocity, flow or the sample itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.hooks.known_values import KnownValues
from partsong.parallel.hooks.noise_levels import NoiseLevels

__all__ = ["Prediction"]

_KINDS = {"epsilon": "epsilon", "v_prediction": "velocity", "sample": "sample"}


class Prediction:
    """Translates between a model's output and its estimate of the clean sample x0.

    At a timestep the model's input is x = a x0 + s e with unit noise e. It predicts e (``epsilon``), a e - s x0
    (``v_prediction``), x0 (``sample``), or, with a = 1 - s, e - x0 (flow matching). In all of them the output is
    affine in x0 for a given x, so a change of x0 is a change of the output by a factor.

    Args:
        scheduler: of a diffusers pipeline; only its configuration is read.

    Raises:
        UnsupportedError: it does not say what the model predicts at which noise level.

    Example:
        >>> import torch
        >>> from diffusers import FlowMatchEulerDiscreteScheduler
        >>> flow = Prediction(FlowMatchEulerDiscreteScheduler())
        >>> flow.clean(torch.ones(1), torch.full((1,), 2.0), 500.0).item()
        0.0
    """

    def __init__(self, scheduler: Any) -> None:
        predicts = scheduler.config.get("prediction_type")
        self._noise = NoiseLevels(scheduler)
        self.kind = "flow" if self._noise.is_flow else _KINDS.get(predicts)
        self._times = KnownValues()
        if self.kind is None:
            raise UnsupportedError(
                f"{type(scheduler).__name__}: it does not say what the model predicts (prediction_type={predicts!r}), "
                "so two resolutions cannot be compared; use DDIM, DPM-Solver, Euler or flow matching"
            )

    def learn(self, timesteps: Tensor) -> None:
        """Reads all timesteps of a schedule at once, since every read makes a GPU's host wait."""
        for timestep, number in zip(timesteps, timesteps.tolist(), strict=True):
            self._times.put(float(number), timestep)

    def clean(self, inputs: Tensor, output: Tensor, timestep: Any) -> Tensor:
        """Estimates the clean sample.

        Args:
            inputs: what the model was given, scaled as the model wants it.
            output: its prediction, of the same shape.
            timestep: of the call.
        """
        signal, noise = self._levels(timestep)
        if self.kind == "sample":
            return output
        if self.kind == "epsilon":
            return (inputs - noise * output) / signal
        return signal * inputs - noise * output if self.kind == "velocity" else inputs - noise * output

    def moved(self, output: Tensor, change: Tensor, timestep: Any) -> Tensor:
        """Returns the prediction whose clean sample is larger by `change`."""
        signal, noise = self._levels(timestep)
        if self.kind == "sample":
            return output + change
        return output - change * (signal / noise if self.kind == "epsilon" else 1 / noise)

    def noise(self, timestep: Any) -> float:
        """Returns the share of noise in the model's input, from 0 to 1: s / (a + s), for flow matching s."""
        signal, noise = self._levels(timestep)
        return noise / (signal + noise)

    def _levels(self, timestep: Any) -> tuple[float, float]:
        """Returns the shares of the clean sample and of the noise in the model's input."""
        time = self._times.of(_number, timestep) if isinstance(timestep, Tensor) else float(timestep)
        return self._noise.at(time)


def _number(timestep: Tensor) -> float:
    return float(timestep.flatten()[0])
