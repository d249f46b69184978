"""Which frames a frame attends to, and how many frames each of them stands for: the keys of clip parallelism.

A frame sees the frames near it, each by itself, and the rest of the video through samples. All of it follows from the
frame's place in the whole video, so it is the same however many ranks share the frames.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from partsong.parallel.ranks.shards import offsets

__all__ = ["ClipLayout", "KeySet", "Run"]

#: Frames `[start, stop)` of those that a clip sees, and the logarithm of how many frames each of them counts for.
Run = tuple[int, int, float]


@dataclass(frozen=True, slots=True)
class KeySet:
    """The keys of every frame of a video.

    Frame f sees frame g by itself where ``|g - f| <= window``. The video is divided into blocks of `stride` frames
    (the last may be shorter); the middle frame of a block, its sample, stands for those frames of its block that f
    does not see by themselves. So every frame of the video counts exactly once, and beyond the ends there is nothing.

    Attributes:
        frames: length of the video.
        window: frames to each side that are seen by themselves; None is all of them.
        stride: length of a block; None leaves out what is not near.

    Example:
        >>> KeySet(frames=8, window=1, stride=4).counts(0)  # itself, its neighbour, 2 and 3 by 1, and 4 to 7 by 5
        ((0, 1, 0), (1, 1, 2), (5, 0, 4))
    """

    frames: int
    window: int | None
    stride: int | None

    def is_near(self, query: int, frame: int) -> bool:
        """Whether a frame is seen by itself."""
        return self.window is None or abs(frame - query) <= self.window

    def sample_of(self, frame: int) -> int:
        """The frame that stands for a frame that is not near."""
        assert self.stride is not None
        start = frame - frame % self.stride
        return (start + min(start + self.stride, self.frames) - 1) // 2

    def counts(self, query: int) -> tuple[tuple[int, int, int], ...]:
        """The frames a frame sees, in order: (frame, 1 where it is seen by itself else 0, others it stands for)."""
        near = [self.is_near(query, frame) for frame in range(self.frames)]
        others = [0] * self.frames
        if self.stride is not None:
            for frame in range(self.frames):
                others[self.sample_of(frame)] += not near[frame]
        every = zip(range(self.frames), map(int, near), others, strict=True)
        return tuple(key for key in every if key[1] or key[2])

    def log_weights(self, query: int, emphasis: tuple[float, float] = (0.0, 0.0)) -> dict[int, float]:
        """What is added to the logits of the frames that a frame sees.

        Args:
            query: the frame.
            emphasis: what is added for a frame seen by itself, and for what a sample stands for.
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
    """The frames of a video over ranks.

    Attributes:
        keys: which frame sees which.
        sizes: frames of each rank's clip, in order.
    """

    keys: KeySet
    sizes: tuple[int, ...]

    def clip(self, index: int) -> range:
        """The frames of a rank."""
        start = offsets(self.sizes)[index]
        return range(start, start + self.sizes[index])

    def seen(self, index: int) -> tuple[int, ...]:
        """The frames that a rank's frames see, in order; its own are among them."""
        return _seen(self.keys, self.clip(index))

    def sent(self, source: int, reader: int) -> tuple[int, ...]:
        """The frames of one rank that another one's see, in order."""
        clip = self.clip(source)
        return tuple(frame for frame in self.seen(reader) if frame in clip)

    def num_sent(self, index: int) -> int:
        """Frames a rank sends, each counted as often as it is sent."""
        peers = (peer for peer in range(len(self.sizes)) if peer != index)
        return sum(len(self.sent(index, peer)) for peer in peers)

    def table(self, index: int, emphasis: tuple[float, float]) -> tuple[tuple[float, ...], ...]:
        """For each frame of a rank what is added to the logits of each frame the rank sees; -inf where it sees not."""
        return _table(self.keys, self.clip(index), emphasis)

    def runs(self, index: int, emphasis: tuple[float, float]) -> list[tuple[range, tuple[Run, ...]]]:
        """The same in pieces: runs of the rank's frames with equal keys, and for each the runs of keys they see."""
        table, found, start = self.table(index, emphasis), [], 0
        for row, same in itertools.groupby(table):
            stop = start + len(list(same))
            found.append((range(start, stop), _runs_of(row)))
            start = stop
        return found


@functools.lru_cache(maxsize=64)
def _seen(keys: KeySet, clip: range) -> tuple[int, ...]:
    return tuple(sorted({frame for query in clip for frame, _, _ in keys.counts(query)}))


@functools.lru_cache(maxsize=64)
def _table(keys: KeySet, clip: range, emphasis: tuple[float, float]) -> tuple[tuple[float, ...], ...]:
    seen = _seen(keys, clip)
    weights = (keys.log_weights(query, emphasis) for query in clip)
    return tuple(tuple(row.get(frame, -math.inf) for frame in seen) for row in weights)


def _runs_of(row: tuple[float, ...]) -> tuple[Run, ...]:
    runs, start = [], 0
    for weight, same in itertools.groupby(row):
        stop = start + len(list(same))
        if weight != -math.inf:
            runs.append((start, stop, weight))
        start = stop
    return tuple(runs)
