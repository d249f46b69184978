"""Says which frames a frame attends to, and for how many frames each of them stands.

A frame sees the frames near it individually, and the rest of the video through samples. This depends only on its
place in the whole video, so it is the same for any number of ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from partsong.parallel.ranks.shards import offsets

__all__ = ["ClipLayout", "KeySet", "Run"]

T = TypeVar("T")

#: Frames `[start, stop)` of those that a clip sees, and the logarithm of the number of frames each stands for.
Run = tuple[int, int, float]


@dataclass(frozen=True, slots=True)
class KeySet:
    """Says which keys every frame of a video sees.

    Frame f sees frame g individually where ``|g - f| <= window``. The video is divided into blocks of `stride` frames,
    of which the last may be shorter. The middle frame of a block is its sample. It stands for those frames of the block
    that f does not see individually. So every frame of the video counts exactly once.

    Attributes:
        frames: length of the video.
        window: frames to each side that are seen individually; None sees all of them.
        stride: length of a block; None leaves out all but near frames.

    Example:
        >>> KeySet(frames=8, window=1, stride=4).counts(0)  # itself, its neighbour, 2 and 3 by 1, and 4 to 7 by 5
        ((0, 1, 0), (1, 1, 2), (5, 0, 4))
    """

    frames: int
    window: int | None
    stride: int | None

    def sample_of(self, frame: int) -> int:
        """Returns the frame that stands for a frame that is not near."""
        assert self.stride is not None
        start = frame - frame % self.stride
        return (start + min(start + self.stride, self.frames) - 1) // 2

    def counts(self, query: int) -> tuple[tuple[int, int, int], ...]:
        """Lists the frames a frame sees: (frame, 1 if seen individually else 0, number of others it stands for)."""
        near = [self.window is None or abs(frame - query) <= self.window for frame in range(self.frames)]
        others = [0] * self.frames
        if self.stride is not None:
            for frame in range(self.frames):
                others[self.sample_of(frame)] += not near[frame]
        every = zip(range(self.frames), map(int, near), others, strict=True)
        return tuple(key for key in every if key[1] or key[2])

    def log_weights(self, query: int, emphasis: tuple[float, float] = (0.0, 0.0)) -> dict[int, float]:
        """Returns what is added to the logits of the frames that a frame sees.

        Args:
            query: the frame.
            emphasis: what is added for a frame seen individually, and for frames that a sample stands for.
        """
        near, far = emphasis
        weights = {}
        for frame, itself, others in self.counts(query):
            parts = [near] * itself + ([far + math.log(others)] if others else [])
            top = max(parts)
            weights[frame] = top + math.log(sum(math.exp(part - top) for part in parts))
        return weights


@dataclass(frozen=True, slots=True)
class ClipLayout:
    """Distributes the frames of a video over ranks.

    Attributes:
        keys: says which frame sees which.
        sizes: frames of each rank's clip, in order.
    """

    keys: KeySet
    sizes: tuple[int, ...]

    def clip(self, index: int) -> range:
        """Returns the frames of a rank."""
        start = offsets(self.sizes)[index]
        return range(start, start + self.sizes[index])

    def seen(self, index: int) -> tuple[int, ...]:
        """Lists the frames that a rank's frames see, in order; its own are among them."""
        return _seen(self.keys, self.clip(index))

    def sent(self, source: int, reader: int) -> tuple[int, ...]:
        """Lists the frames of one rank that another rank's frames see, in order."""
        clip = self.clip(source)
        return tuple(frame for frame in self.seen(reader) if frame in clip)

    def num_sent(self, index: int) -> int:
        """Counts the frames a rank sends, each as often as it is sent."""
        peers = (peer for peer in range(len(self.sizes)) if peer != index)
        return sum(len(self.sent(index, peer)) for peer in peers)

    def table(self, index: int, emphasis: tuple[float, float]) -> tuple[tuple[float, ...], ...]:
        """Returns what each frame of a rank adds to the logits of each frame the rank sees; -inf for unseen ones."""
        return _table(self.keys, self.clip(index), emphasis)

    def runs(self, index: int, emphasis: tuple[float, float]) -> list[tuple[range, tuple[Run, ...]]]:
        """Returns the table in pieces: runs of the rank's frames with equal keys, and the runs of keys each sees."""
        rows = _equal_runs(self.table(index, emphasis))
        return [
            (frames, tuple((keys.start, keys.stop, weight) for keys, weight in _equal_runs(row) if weight != -math.inf))
            for frames, row in rows
        ]


@functools.lru_cache(maxsize=64)
def _seen(keys: KeySet, clip: range) -> tuple[int, ...]:
    return tuple(sorted({frame for query in clip for frame, _, _ in keys.counts(query)}))


@functools.lru_cache(maxsize=64)
def _table(keys: KeySet, clip: range, emphasis: tuple[float, float]) -> tuple[tuple[float, ...], ...]:
    seen = _seen(keys, clip)
    weights = (keys.log_weights(query, emphasis) for query in clip)
    return tuple(tuple(row.get(frame, -math.inf) for frame in seen) for row in weights)


def _equal_runs(items: Iterable[T]) -> Iterator[tuple[range, T]]:
    """Yields the places of each run of equal items, and the item."""
    start = 0
    for item, same in itertools.groupby(items):
        stop = start + len(list(same))
        yield range(start, stop), item
        start = stop
