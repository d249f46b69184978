"""Keeps the clean keys of the past, and says which keys each block in flight sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from partsong.samplers.long_video.neighbour_keys import KeyValues, size_of, tokens_of
from partsong.samplers.long_video.staged_frames import KeysAround

__all__ = ["CleanKeys"]


@dataclass(slots=True)
class _Past:
    """Holds what the clean blocks have left in one attention: the sink, and the newest blocks by number."""

    sink: KeyValues | None = None
    blocks: dict[int, KeyValues] = field(default_factory=dict)


class CleanKeys:
    """Keeps the keys of clean blocks for every attention, in one bounded cache.

    Args:
        frames: latent frames of a block.
        window: clean blocks that are kept.
        sink: first frames of the video that are always kept.

    Attributes:
        peak_bytes: the most that was held.
    """

    def __init__(self, frames: int, window: int, sink: int) -> None:
        self.frames, self.window, self.sink = frames, window, sink
        self.peak_bytes = 0
        self._past: dict[tuple[int, int], _Past] = {}
        self._size = 0

    def take_in(self, place: tuple[int, int], block: int, k: Tensor, v: Tensor) -> None:
        """Takes in the keys of a clean block.

        Args:
            place: the attention and the call of a step.
            block: its number.
            k: its keys `[B, H, L, D]`.
            v: its values.
        """
        past = self._past.setdefault(place, _Past())
        if past.sink is None and self.sink:
            past.sink = tokens_of(k, v, slice(0, k.shape[2] // self.frames * self.sink))
            self._size += size_of([past.sink])
        past.blocks[block] = k, v
        self._size += size_of([(k, v)])
        self.peak_bytes = max(self.peak_bytes, self._size)

    def drop_old(self, place: tuple[int, int]) -> None:
        """Drops the blocks that no later call sees."""
        past = self._past.get(place, _Past())
        while len(past.blocks) > self.window:
            self._size -= size_of([past.blocks.pop(min(past.blocks))])

    def around(self, place: tuple[int, int], block: int, present: Mapping[int, KeyValues]) -> KeysAround:
        """Returns the keys around a block: what it sees besides itself, in the order of the video.

        Args:
            place: the attention and the call of a step.
            block: its number.
            present: keys of the blocks that are denoised in this slot; none where it makes its clean call.
        """
        past = self._past.get(place, _Past())
        first = max(0, min([block - self.window, *present]))
        seen = [*range(first, block), *(other for other in present if other > block)]
        around = [(*(present.get(other) or past.blocks[other]), (other - block) * self.frames) for other in seen]
        # While the first block is among those that are seen its frames are seen there.
        if past.sink is not None and first > 0:
            around.insert(0, (*past.sink, (first - block) * self.frames - self.sink))
        return around
