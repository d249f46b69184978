"""Weights of tiny random models, and noise: the same in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Seeded noise, the same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randomize(model: Any, scale: float = 0.2) -> None:
    """Draws random weights everywhere, also where the class starts with zeros."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)


def randomized(model: Any, dtype: torch.dtype = torch.float64, scale: float = 0.2) -> Any:
    """The model with seeded random weights everywhere."""
    torch.manual_seed(11)
    randomize(model, scale)
    return model.eval().to(dtype)


class KeepPrecision(TorchFunctionMode):
    """Leaves out the models' casts from float64 to float32, so that float64 can show that the sums are exact."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        cast = func in (Tensor.to, Tensor.float) and (args[0].dtype, output.dtype) == (torch.float64, torch.float32)
        return args[0] if cast else output
