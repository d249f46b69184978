"""Packs weights of a block into chunks of the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["PackedBlock", "weights_that_stay"]

#: Bytes at whose multiples weights and chunks begin, as allocators place them.
_ALIGNED = 256


class PackedBlock:
    """Keeps weights of a block in chunks of the host's memory; on the device they are views of a room for blocks.

    Args:
        unit: the block.
        weights: those that are kept here.
        chunk_bytes: bytes of a chunk, rounded to a multiple of 256; the last one may be smaller.
        pinned: whether a device copies from the chunks.

    Attributes:
        size: bytes of the room that the weights need.
    """

    def __init__(self, unit: nn.Module, weights: Sequence[nn.Parameter], *, chunk_bytes: int, pinned: bool) -> None:
        self.unit, self.weights = unit, list(weights)
        self._chunk_bytes, self._pinned = max(1, chunk_bytes // _ALIGNED) * _ALIGNED, pinned
        self._devices = [weight.device for weight in self.weights]
        self._chunks: list[Tensor] = []
        self._lay_out(self.weights)

    def _lay_out(self, values: Sequence[Tensor]) -> None:
        self._like = [(value.dtype, value.shape, value.stride()) for value in values]
        self._starts, self.size = [], 0
        for value in values:
            self._starts.append(self.size)
            self.size += -(-value.nbytes // _ALIGNED) * _ALIGNED

    @property
    def is_packed(self) -> bool:
        """Says whether the chunks hold the weights."""
        return bool(self._chunks)

    def pack(self, values: Sequence[Tensor] | None = None) -> None:
        """Fills the chunks with the weights' values, or with others in their place."""
        values = [weight.data for weight in self.weights] if values is None else values
        self._lay_out(values)
        whole = torch.zeros(self.size, dtype=torch.uint8)
        for view, value in zip(self._views(whole), values, strict=True):
            view.copy_(value)
        # A chunk is an allocation of its own: torch rounds those of pinned memory up to a power of two.
        chunks = whole.split(self._chunk_bytes)
        self._chunks = [chunk.pin_memory() for chunk in chunks] if self._pinned else [chunk.clone() for chunk in chunks]

    def _views(self, room: Tensor) -> list[Tensor]:
        return [_view(room, start, *like) for start, like in zip(self._starts, self._like, strict=True)]

    def value(self, place: int) -> Tensor:
        """Returns the value of one of the weights, in the host's memory."""
        dtype, shape, stride = self._like[place]
        start, end = self._starts[place], self._starts[place] + shape.numel() * dtype.itemsize
        first = start // self._chunk_bytes
        chunks = torch.cat(self._chunks[first : max(first + 1, -(-end // self._chunk_bytes))])
        return _view(chunks, start - first * self._chunk_bytes, dtype, shape, stride)

    def place_in(self, room: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Makes the weights views of a room; returns where each chunk goes in it, and where it comes from."""
        for weight, view in zip(self.weights, self._views(room), strict=True):
            weight.data = view
        return list(zip(room[: self.size].split(self._chunk_bytes), self._chunks, strict=True))

    def cast(self, convert: Callable[[Tensor], Tensor]) -> bool:
        """Casts the weights as a module's ``_apply`` would, but moves none; says whether that has changed them."""
        types = {dtype: convert(torch.empty(0, dtype=dtype)).dtype for dtype, _, _ in self._like}
        if all(dtype == now for dtype, now in types.items()):
            return False
        self.pack([self.value(place).to(types[like[0]]) for place, like in enumerate(self._like)])
        return True

    def keep(self, staying: Sequence[nn.Parameter], device: torch.device) -> list[tuple[nn.Parameter, torch.device]]:
        """Moves some of the weights to a device for good; returns each with where it was."""
        chosen = {id(weight) for weight in staying}
        rows = [(weight, self.value(n), self._devices[n]) for n, weight in enumerate(self.weights)]
        moving, rest = ([row for row in rows if (id(row[0]) in chosen) == is_moved] for is_moved in (True, False))
        for weight, value, _ in moving:
            weight.data = value.to(device, copy=True)
        self.weights, self._devices = [weight for weight, _, _ in rest], [before for _, _, before in rest]
        self.pack([value for _, value, _ in rest])
        return [(weight, before) for weight, _, before in moving]

    def restore(self) -> None:
        """Gives the weights memory of their own again, where they were."""
        for place, (weight, device) in enumerate(zip(self.weights, self._devices, strict=True)):
            weight.data = self.value(place).to(device, copy=True)
        self._chunks = []


def _view(room: Tensor, start: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    flat = room[start : start + shape.numel() * dtype.itemsize].view(dtype)
    return flat.as_strided(shape, stride, flat.storage_offset())


def weights_that_stay(weights: Sequence[nn.Parameter], share: float) -> list[nn.Parameter]:
    """Chooses whole weights of a block that stay on the device: the largest that fit into a share of its bytes.

    Args:
        weights: of the block.
        share: of their bytes, from 0 to 1.
    """
    left, staying = int(share * sum(weight.nbytes for weight in weights)), []
    for weight in sorted(weights, key=lambda weight: -weight.nbytes):
        if weight.nbytes <= left:
            staying.append(weight)
            left -= weight.nbytes
    return staying
