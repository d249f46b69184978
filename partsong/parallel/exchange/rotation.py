"""Decides which of its rows a rank sends to whom in which step, where most rows are refreshed in turns.

All of it is a function of sizes, ranks, layer and step, so the two ends of every message agree without a word.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from partsong.parallel.adapters.row import IMAGE
from partsong.parallel.attention_call import Runs
from partsong.parallel.ranks.shards import offsets, split_sizes

__all__ = ["Rotation", "Slices", "View", "num_rows", "rotation_of", "select", "view_of", "visible"]

#: The rows of one shard as pieces (stream, rows), and those of every shard.
Pieces = tuple[tuple[str, slice], ...]
View = tuple[Pieces, ...]
#: Runs of a shard's rows, in order.
Slices = tuple[slice, ...]


def visible(shard: Runs, distance: int, portion: float) -> Pieces:
    """Returns the rows of a shard that lie near a rank `distance` shards later (earlier where negative).

    These are all text, and the image tokens within `portion` of a patch from the rank's border, rounded up. A portion
    above 1 covers the neighbour's patch and reaches into the next but one.

    Example:
        >>> visible((("text", 2), ("image", 10)), 1, 0.3)
        (('text', slice(0, 2, None)), ('image', slice(9, 12, None)))
    """
    return _nearest(shard, distance, _reach(shard, distance, portion))


def _reach(shard: Runs, distance: int, portion: float) -> int:
    """Counts the image tokens of a shard that are within a portion of a patch."""
    reach = min(max(portion - abs(distance) + 1.0, 0.0), 1.0)
    return math.ceil(reach * _images(shard) - 1e-9)  # 1.3 - 1 is a little more than 0.3, and not one token more


def _images(shard: Runs) -> int:
    return sum(length for stream, length in shard if stream == IMAGE)


def _nearest(shard: Runs, distance: int, count: int) -> Pieces:
    """Returns all text of a shard, and the image tokens that lie nearest to a rank that is `distance` shards away."""
    total = _images(shard)
    first, last = (total - count, total) if distance > 0 else (0, count)
    pieces, row, image = [], 0, 0
    for stream, length in shard:
        start, stop = 0, length
        if stream == IMAGE:
            start, stop = (min(max(edge - image, 0), length) for edge in (first, last))
            image += length
        pieces.append((stream, slice(row + start, row + stop)))
        row += length
    return tuple(pieces)


def view_of(runs: Sequence[Runs], viewer: int, portion: float) -> View:
    """Returns what lies near one rank in every shard; in its own everything does."""
    return tuple(visible(shard, viewer - index, portion) for index, shard in enumerate(runs))


def num_rows(pieces: Pieces) -> int:
    """Counts the tokens in the pieces of a shard."""
    return sum(_length(rows) for _, rows in pieces)


def _length(rows: slice) -> int:
    return rows.stop - rows.start


def select(whole: Tensor, runs: Sequence[Runs], view: View) -> Iterator[Tensor]:
    """Yields the parts of a buffer, which holds the rows of all shards, that belong to a view."""
    starts = offsets([sum(length for _, length in shard) for shard in runs])
    for start, pieces in zip(starts, view, strict=True):
        for rows in _joined(rows for _, rows in pieces):
            yield whole[start + rows.start : start + rows.stop]


def _joined(parts: Iterator[slice]) -> Slices:
    """Joins slices, which are in order, into as few as possible."""
    joined: list[slice] = []
    for rows in parts:
        if joined and joined[-1].stop == rows.start:
            joined[-1] = slice(joined[-1].start, rows.stop)
        elif rows.stop > rows.start:
            joined.append(rows)
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Says which of its own rows a rank sends to each rank.

    Attributes:
        always: for each rank, the rows it is sent in every step.
        turns: for each turn and rank, the rows it is sent in that turn. After the last turn comes the first again.
    """

    always: tuple[Slices, ...]
    turns: tuple[tuple[Slices, ...], ...]

    def turn_of(self, step: int, layer: int) -> int:
        """Returns the turn of a step; layers take turns at different times, so that steps have like sizes."""
        return (step + layer) % len(self.turns)

    def due(self, step: int, layer: int) -> tuple[Slices, ...]:
        """Returns for each rank the rows it is sent in a step."""
        turn = self.turns[self.turn_of(step, layer)]
        return tuple(always + now for always, now in zip(self.always, turn, strict=True))

    def count(self, step: int, layer: int) -> int:
        """Counts the rows that are sent in a step, to all ranks together."""
        return sum(_length(rows) for slices in self.due(step, layer) for rows in slices)


@functools.lru_cache(maxsize=4096)
def rotation_of(runs: tuple[Runs, ...], sender: int, portion: float, far: float) -> Rotation:
    """Plans what one rank sends in each step.

    A step's budget, in rows, is that of the busiest rank if all ranks sent each other what is `visible` within
    `portion`. Each rank first spends its own share of it that is not for far rows on the nearest image tokens, in every
    step. All other rows, and all text, share what is left: they are put in a line, rank after rank, and in each turn
    the next run of the line is sent. So the turns of a rank have the same size, but for one row.

    Args:
        runs: the token runs of every shard.
        sender: the rank that sends.
        portion: how many patches far the budget would reach.
        far: share of the budget that takes turns, above 0.

    Example:
        >>> runs = ((("image", 10),), (("image", 10),))
        >>> rotation = rotation_of(runs, 0, 0.4, 0.5)  # 4 rows in each step: the 2 nearest always, 8 in 4 turns
        >>> [rotation.due(step, 0)[1] for step in range(2)]
        [(slice(8, 10, None), slice(0, 2, None)), (slice(8, 10, None), slice(2, 4, None))]
    """
    viewers, own = range(len(runs)), runs[sender]
    reaches = {viewer: _reach(own, viewer - sender, portion) for viewer in viewers if viewer != sender}
    near = {viewer: math.floor((1.0 - far) * reach + 1e-9) for viewer, reach in reaches.items()}
    always = [
        _joined(part for stream, part in _nearest(own, viewer - sender, near[viewer]) if stream == IMAGE)
        if viewer != sender
        else ()
        for viewer in viewers
    ]
    budget = max(_rows_within(runs, index, portion) for index in viewers) - sum(near.values())
    # Ranks begin with the one after them, so that not all send to the same one at once.
    line = [(viewer, rows) for viewer in _others(len(runs), sender) for rows in _without(own, always[viewer])]
    total = sum(_length(rows) for _, rows in line)
    num_turns = math.ceil(total / max(budget, 1)) or 1
    turns = _cut(line, split_sizes(total, num_turns), len(runs))
    return Rotation(tuple(always), tuple(turns))


def _rows_within(runs: tuple[Runs, ...], sender: int, portion: float) -> int:
    return sum(num_rows(visible(runs[sender], v - sender, portion)) for v in range(len(runs)) if v != sender)


def _others(size: int, index: int) -> list[int]:
    return [(index + step) % size for step in range(1, size)]


def _without(shard: Runs, taken: Slices) -> Slices:
    """Returns the rows of a shard that some slices, which are in order, do not cover."""
    edges = [0, *itertools.chain.from_iterable((rows.start, rows.stop) for rows in taken)]
    edges.append(sum(length for _, length in shard))
    return _joined(slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def _cut(line: Sequence[tuple[int, slice]], sizes: Sequence[int], viewers: int) -> Iterator[tuple[Slices, ...]]:
    """Cuts a line of rows, each run of them for one rank, into turns of the given sizes."""
    left = list(reversed(line))
    for size in sizes:
        turn: list[list[slice]] = [[] for _ in range(viewers)]
        while size:
            viewer, rows = left.pop()
            stop = min(rows.stop, rows.start + size)
            turn[viewer].append(slice(rows.start, stop))
            size -= stop - rows.start
            if stop < rows.stop:
                left.append((viewer, slice(stop, rows.stop)))
        yield tuple(map(tuple, turn))
