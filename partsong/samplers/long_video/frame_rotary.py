"""Moves rotary positions along the frames of a video: keys that were turned once are turned on by a difference.

Rotary attention depends on differences of positions only. So a block of frames may count its own from zero, and the
keys of another block are brought to where they belong by one more rotation, of the time part alone. No position grows
with the length of a video, and no table has an end to reach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError

__all__ = ["FRAME_TABLES", "FrameRotary"]

#: Cosine and sine, one per pair of neighbouring channels, of a turn by some frames.
Turn = tuple[Tensor, Tensor]


def _wan(module: Any, frames: int) -> Turn:
    """Returns Wan's turn: of its pairs of channels the first turn with time, the others with height and width."""
    rope = module.rope
    cos, sin = rope.freqs_cos[frames, 0::2].clone(), rope.freqs_sin[frames, 1::2].clone()
    cos[rope.t_dim // 2 :], sin[rope.t_dim // 2 :] = 1.0, 0.0
    return cos, sin


#: Model class -> how its self-attention turns channels per frame, and the dim of frames in its latents.
FRAME_TABLES: Mapping[str, tuple[Callable[[Any, int], Turn], int]] = MappingProxyType(
    {"WanTransformer3DModel": (_wan, 2), "SkyReelsV2Transformer3DModel": (_wan, 2)}
)


class FrameRotary:
    """Turns keys of one model along time.

    Args:
        module: the transformer.

    Attributes:
        frames_dim: dim of the frames in its latents.

    Raises:
        UnsupportedError: the model's positions are not known to be relative along time.
    """

    def __init__(self, module: nn.Module) -> None:
        name = type(module).__name__
        if name not in FRAME_TABLES:
            raise UnsupportedError(
                f"{name}: its positions in time are not known to be relative, so blocks of frames cannot share keys; "
                f"use ClipParallel, or one of {', '.join(FRAME_TABLES)}"
            )
        config: Any = module.config
        if config["patch_size"][0] != 1:
            raise UnsupportedError(
                f"{name}: patch_size {tuple(config['patch_size'])} mixes frames; 1 is needed in time"
            )
        self._module, (self._table, self.frames_dim) = module, FRAME_TABLES[name]
        self._turns: dict[tuple[int, torch.device], Turn] = {}

    def turned(self, keys: Tensor, frames: int) -> Tensor:
        """Returns keys `[B, H, L, D]` as they would be a number of frames later (earlier where negative)."""
        if frames == 0:
            return keys
        cos, sin = self._turn(abs(frames), keys.device)
        sin = sin if frames > 0 else -sin
        even, odd = keys[..., 0::2], keys[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(keys.dtype)

    def _turn(self, frames: int, device: torch.device) -> Turn:
        key = (frames, device)
        if key not in self._turns:
            cos, sin = self._table(self._module, frames)
            self._turns[key] = cos.to(device), sin.to(device)
        return self._turns[key]
