"""Measures in shapes what an autoencoder computes and holds while it decodes, and carries it over to any size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from partsong.parallel.plan.live_bytes import LiveBytes
from partsong.planner.operators import OperatorWork, work_of

__all__ = ["SIDE", "DecoderCost", "decoding_of"]

#: Rows and columns of the latents that are decoded to see what it takes.
SIDE = 16


@dataclass(frozen=True, slots=True)
class DecoderCost:
    """Says what decoding takes, in proportion to the pixels: its layers are convolutions, so nothing grows faster.

    Attributes:
        work: operators of a small decoding.
        pixels: how many that made, over all frames.
        peak: bytes alive at its peak for each pixel.
        weights: bytes of the decoder's weights.
    """

    work: tuple[OperatorWork, ...]
    pixels: int
    peak: float
    weights: int

    def grown(self, pixels: int) -> Iterator[OperatorWork]:
        """Yields the operators of decoding a number of pixels."""
        scale = pixels / self.pixels
        for work in self.work:
            yield OperatorWork(work.kind, work.flops * scale, int(work.bytes * scale), work.tiles * scale)

    def memory(self, pixels: int) -> int:
        """Returns the bytes alive at the peak of decoding a number of pixels at once."""
        return int(self.peak * pixels)


def decoding_of(coder: nn.Module, channels: int, frames: int | None) -> DecoderCost:
    """Traces a small decoding.

    Args:
        coder: an autoencoder of diffusers; the shapes of its weights are used only.
        channels: of its latents.
        frames: of the latents of a short clip; None where it decodes pictures.
    """
    shape = (1, channels, SIDE, SIDE) if frames is None else (1, channels, frames, SIDE, SIDE)
    state = {name: tensor.detach().to("meta") for name, tensor in (*coder.named_parameters(), *coder.named_buffers())}
    dtype = next(coder.parameters()).dtype
    work = _Work()
    with torch.no_grad(), LiveBytes(state.values()) as live, work:
        result = torch.func.functional_call(
            _Decode(coder), _inside(state), (torch.empty(shape, dtype=dtype, device="meta"),)
        )
    pixels = result.shape[-1] * result.shape[-2] * (1 if frames is None else result.shape[2])
    weights = sum(weight.nbytes for name, weight in coder.named_parameters() if not name.startswith("encoder."))
    return DecoderCost(tuple(work.events), pixels, live.peak / pixels, weights)


def _inside(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"coder.{name}": tensor for name, tensor in state.items()}


class _Decode(nn.Module):
    def __init__(self, coder: Any) -> None:
        super().__init__()
        self.coder = coder

    def forward(self, latents: Tensor) -> Tensor:
        return self.coder.decode(latents).sample


class _Work(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[OperatorWork] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if (work := work_of(func, args, kwargs or {}, output)) is not None:
            self.events.append(work)
        return output
