"""The few transforms of pictures that two pipelines take from torchvision, where that is not installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class InterpolationMode(Enum):
    NEAREST = "nearest"


@dataclass(frozen=True)
class Compose:
    """Applies one after the other."""

    steps: Sequence[Callable[[Any], Any]]

    def __call__(self, image: Any) -> Any:
        for step in self.steps:
            image = step(image)
        return image


@dataclass(frozen=True)
class Lambda:
    """Applies a function."""

    function: Callable[[Any], Any]

    def __call__(self, image: Any) -> Any:
        return self.function(image)


class ToTensor:
    """Turns a picture of bytes into numbers from 0 to 1, channels first."""

    def __call__(self, image: Any) -> Tensor:
        return torch.from_numpy(np.array(image)).movedim(-1, 0).float() / 255


@dataclass(frozen=True)
class Normalize:
    """Subtracts a mean for each channel and divides by a deviation."""

    mean: Sequence[float]
    std: Sequence[float]
    inplace: bool = False

    def __call__(self, image: Tensor) -> Tensor:
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (image - mean) / std


def resize(image: Tensor, size: list[int], interpolation: InterpolationMode) -> Tensor:
    """Resizes pictures `[..., H, W]`."""
    height, width = image.shape[-2:]
    resized = F.interpolate(image.reshape(1, -1, height, width), tuple(size), mode=interpolation.value)
    return resized.reshape(*image.shape[:-2], *size)


functional = SimpleNamespace(resize=resize)


def lend_to(module: ModuleType, **others: Any) -> None:
    """Gives a module of diffusers these transforms, and what it takes only beside them, if it found none."""
    for name, value in {"transforms": _HERE, **others}.items():
        vars(module).setdefault(name, value)


_HERE = SimpleNamespace(**{name: value for name, value in globals().items() if not name.startswith("_")})
