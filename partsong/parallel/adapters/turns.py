"""Describes rotary positions along time as data: how models turn queries and keys by their frame.

All models turn pairs of neighbouring channels, by an angle that grows evenly from frame to frame. A row says how fast
each pair turns, in one of three forms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError

__all__ = ["Falling", "Learned", "FrameTurns", "Woven"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameTurns:
    """Describes rotary positions along time; the base of the three forms.

    Attributes:
        needs: configuration values without which the model uses other positions, which are not relative.
    """

    needs: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))

    def rates(self, module: nn.Module) -> Tensor:
        """Returns the radians that each pair of channels turns from one frame to the next, at pace 1.

        Args:
            module: the model.

        Returns:
            Of type float64, `[D / 2]`, or `[H, 1, D / 2]` where heads differ.
        """
        raise NotImplementedError

    def pace(self, module: nn.Module, named: Mapping[str, Any]) -> float:
        """Returns how much faster keys turn in a call with these arguments.

        Raises:
            UnsupportedError: the caller passes the token positions.
        """
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Falling(FrameTurns):
    """Describes heads whose first n channels belong to time: pair i turns by ``base ** (-2 i / n)`` a frame.

    Attributes:
        channels: the configuration value whose first number is n; None where `others` says it.
        others: (part, whole): height and width each have `part` of every `whole` channels of a head; time has the rest.
        base: the number, or the configuration value that holds it.
        slowed: name of the argument whose first number divides all rates.
    """

    channels: str | None = None
    others: tuple[int, int] = (2, 6)
    base: float | str = 10000.0
    slowed: str | None = None

    def rates(self, module: nn.Module) -> Tensor:
        """Returns `[D / 2]`, zero for the pairs of height and width."""
        config: Any = module.config
        part, of = self.others
        if self.channels is None:
            head = config["attention_head_dim"]
            time = head - 2 * part * (head // of)
        else:
            head, time = sum(config[self.channels]), config[self.channels][0]
        base = config[self.base] if isinstance(self.base, str) else self.base
        rates = torch.zeros(head // 2, dtype=torch.float64)
        rates[: time // 2] = base ** (-torch.arange(0, time, 2, dtype=torch.float64) / time)
        return rates

    def pace(self, module: nn.Module, named: Mapping[str, Any]) -> float:
        """Returns one over the first number of `slowed`."""
        factor = None if self.slowed is None else named.get(self.slowed)
        return 1.0 if factor is None else 1.0 / float(factor[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned(FrameTurns):
    """Describes a model that has learned how fast each pair turns.

    Attributes:
        parameter: name of the rates `[3, H, D / 2]` for time, height and width.
    """

    parameter: str

    def rates(self, module: nn.Module) -> Tensor:
        """Returns `[H, 1, D / 2]`."""
        return module.get_parameter(self.parameter)[0].detach().double().cpu().unsqueeze(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Woven(FrameTurns):
    """Describes pairs of all heads in one sequence, in which time, height and width take turns.

    The k-th of n turns of time goes by ``base ** (k / (n - 1)) * pi`` while a video of `length` passes. A few pairs in
    front, left over after the others are shared out, do not turn.

    Attributes:
        length: frames of that video.
        scale: the argument whose first number is the distance of two frames; without it, frames are `length` apart.
        refused: the argument in which a caller passes the position of every token, which need not be relative.
        base: how much faster the last turn is than the first.
    """

    length: float
    scale: str
    refused: str
    base: float = 10000.0

    def rates(self, module: nn.Module) -> Tensor:
        """Returns `[H, 1, D / 2]`."""
        config: Any = module.config
        heads, head = config["num_attention_heads"], config["attention_head_dim"]
        each = heads * head // 6
        rates = torch.zeros(heads * head // 2, dtype=torch.float64)
        rates[len(rates) - 3 * each :: 3] = self.base ** torch.linspace(0, 1, each, dtype=torch.float64) * math.pi
        return rates.view(heads, 1, head // 2)

    def pace(self, module: nn.Module, named: Mapping[str, Any]) -> float:
        """Returns the distance of two frames, in lengths of the video."""
        config: Any = module.config
        if named.get(self.refused) is not None:
            raise UnsupportedError(
                f"{self.refused} was given, and token positions passed by the caller are not known to move with "
                "the frames of a block; use ClipParallel"
            )
        scale = named.get(self.scale)
        return 1.0 if scale is None else float(scale[0]) * config["patch_size_t"] / self.length
