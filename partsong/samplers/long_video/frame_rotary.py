"""Moves rotary positions along the frames of a video: rotated keys are rotated further by a difference.

Rotary attention depends on differences of positions only. So a block may count its own frames from zero, and the keys
of another block are moved into place by one more rotation of the time part. Positions do not grow with the length of a
video, and no table runs out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import ADAPTERS, Adapter

__all__ = ["FrameRotary", "frames_per_token", "turning_models"]


def turning_models() -> tuple[str, ...]:
    """Lists the models whose rows say how keys rotate with their frame."""
    return tuple(name for name, row in ADAPTERS.items() if row.frames is not None and row.frames.turns is not None)


def frames_per_token(module: Any, adapter: Adapter) -> int:
    """Counts the latent frames that a model puts into one frame of tokens."""
    patch = None if adapter.frames is None or adapter.frames.patch is None else module.config[adapter.frames.patch]
    return int((patch[0] if isinstance(patch, list | tuple) else patch) or 1)


class FrameRotary:
    """Turns keys of one model along time.

    Args:
        module: the transformer.
        adapter: its row.

    Raises:
        UnsupportedError: the model's positions are not known to be relative along time.
    """

    def __init__(self, module: nn.Module, adapter: Adapter) -> None:
        turns = None if adapter.frames is None else adapter.frames.turns
        if turns is None:
            raise UnsupportedError(
                f"{adapter.model}: its positions in time are not known to be relative, so blocks of frames cannot "
                f"share keys; use ClipParallel, or one of {', '.join(turning_models())}"
            )
        config: Any = module.config
        for name, needed in turns.needs.items():
            if bool(config[name]) != needed:
                raise UnsupportedError(
                    f"{adapter.model}: {name}={config[name]} in its configuration: positions are added to its frames "
                    "and not relative, so blocks of frames cannot share keys; use ClipParallel"
                )
        if frames_per_token(module, adapter) != 1:
            raise UnsupportedError(
                f"{adapter.model}: {adapter.frames.patch if adapter.frames else None} mixes "
                f"{frames_per_token(module, adapter)} frames in each token; 1 is needed in time"
            )
        self._module, self._how = module, turns
        self._pace = 1.0
        self._rates: Tensor | None = None
        self._turns: dict[tuple[float, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def begin(self, named: Mapping[str, Any]) -> None:
        """Reads how fast keys rotate in a call with these arguments."""
        self._pace = self._how.pace(self._module, named)

    def turned(self, keys: Tensor, frames: int) -> Tensor:
        """Returns keys `[B, H, L, D]` as they would be a number of frames later (earlier where negative)."""
        if frames == 0:
            return keys
        cos, sin = self._turn(frames * self._pace, keys)
        even, odd = keys[..., 0::2], keys[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(keys.dtype)

    def _turn(self, distance: float, keys: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(keys.dtype, torch.float32)
        key = (distance, keys.device, dtype)
        if key not in self._turns:
            if self._rates is None:
                self._rates = self._how.rates(self._module)
            angles = distance * self._rates
            cos, sin = (part.to(device=keys.device, dtype=dtype) for part in (angles.cos(), angles.sin()))
            self._turns[key] = cos, sin
        return self._turns[key]
