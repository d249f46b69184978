"""Lets a model that predicts noise serve as an expert among models that predict velocities."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import ArgumentError
from partsong.parallel.hooks.arguments import ArgumentNames
from partsong.parallel.hooks.model_hooks import signature_of
from partsong.parallel.hooks.samples import map_sample

__all__ = ["NoiseExpert"]


class NoiseExpert(nn.Module):
    """Calls a model that predicts noise as one that predicts the velocity of a straight flow.

    The flow mixes x = (1 - s) clean + s noise; the model was trained on alpha clean + sigma noise. The two agree
    where sigma / alpha = s / (1 - s), up to the factor alpha / (1 - s) = sigma / s. So the model is called with x times
    that factor at the timestep with that ratio. Its noise gives the clean sample and the velocity, (x - clean) / s.
    Timesteps between those of the table are interpolated in the logarithm of the ratio. Where the flow has more or less
    noise than the table covers, the model is called at the end of the table.

    Args:
        model: takes latents first and ``timestep`` by name, and predicts noise.
        alphas_cumprod: its noise schedule, `[timesteps]`, falling; diffusers' schedulers have it.
        unit: the flow's timestep at pure noise: 1000 for Stable Diffusion 3, 1 for Flux.

    Raises:
        ArgumentError: the table does not fall, or leaves the range between 0 and 1.

    Source: Heterogeneous decentralized diffusion models, arXiv 2603.06741.
    """

    def __init__(self, model: nn.Module, alphas_cumprod: Tensor, *, unit: float = 1000.0) -> None:
        super().__init__()
        table = alphas_cumprod.double()
        if table.ndim != 1 or len(table) < 2 or not bool(((table > 0) & (table < 1)).all()):
            raise ArgumentError("NoiseExpert: alphas_cumprod must be two or more numbers between 0 and 1")
        if not bool((table.diff() < 0).all()):
            raise ArgumentError("NoiseExpert: alphas_cumprod must fall from one timestep to the next")
        self.model, self.unit = model, unit
        # Logarithms of sigma / alpha, rising.
        self.register_buffer("ratios", 0.5 * ((1 - table) / table).log(), persistent=False)

    @property
    def config(self) -> Any:
        """Returns the model's configuration."""
        return self.model.config

    @property
    def forward_signature(self) -> inspect.Signature:
        """Returns the signature of the model's forward."""
        return signature_of(self.model)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Predicts velocities; the arguments are those of the model, with the flow's latents and timesteps."""
        names = ArgumentNames(self.forward_signature)
        given = names.of(args, named)
        latents = next(iter(self.forward_signature.parameters))
        noisy, timestep = given[latents], given["timestep"]
        level = (timestep.to(noisy.device).double() / self.unit).reshape(-1)
        asked, log_ratio = self._timestep(level)
        ratio = log_ratio.exp()
        alpha, sigma = (1 + ratio.square()).rsqrt(), ratio * (1 + ratio.square()).rsqrt()
        level, alpha, sigma = (each.to(noisy.dtype).view(-1, *[1] * (noisy.ndim - 1)) for each in (level, alpha, sigma))
        # Equal within the table; beyond its ends, this keeps the noise (or the signal) of the model's input right.
        scaled = noisy * torch.where(level > 0.5, sigma / level, alpha / (1 - level))
        asked = asked.to(timestep.dtype if timestep.is_floating_point() else noisy.dtype)
        args, named = names.passed(given | {latents: scaled, "timestep": asked}, names.positions(args))
        output = self.model(*args, **named)
        return map_sample(output, lambda noise: (noisy - (scaled - sigma * noise) / alpha) / level)

    def _timestep(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the timesteps whose ratio of noise to signal is the flow's, and the logarithm of that ratio."""
        table: Any = self.ratios
        wanted = torch.logit(level).clamp(table[0], table[-1])
        after = torch.searchsorted(table, wanted).clamp(1, len(table) - 1)
        low, high = table[after - 1], table[after]
        return after - 1 + (wanted - low) / (high - low), wanted
