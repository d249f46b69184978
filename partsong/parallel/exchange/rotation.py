"""Decides which rows a rank sends to which rank in which step, where most rows are refreshed in turns.

All of it is a function of sizes, ranks, layer and step, so both ends of a message agree without communicating.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain

from torch import Tensor

from partsong.parallel.adapters.row import IMAGE
from partsong.parallel.attention_call import Runs
from partsong.parallel.ranks.shards import offsets, split_sizes

__all__ = ["Rotation", "Slices", "View", "count_rows", "num_rows", "rotation_of", "select", "view_of", "visible"]

#: The rows of one shard as pieces (stream, rows), and those of every shard.
Pieces = tuple[tuple[str, slice], ...]
View = tuple[Pieces, ...]
#: Runs of a shard's rows, in order.
Slices = tuple[slice, ...]

#: Blocks into which rows are cut for their turns, unless a small budget needs more.
MOST_BLOCKS = 16


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
    return math.ceil(reach * _images(shard) - 1e-9)  # 1.3 - 1 is slightly more than 0.3, which must not add a token


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
    """Returns the rows near one rank in every shard; its own shard counts as a whole."""
    return tuple(visible(shard, viewer - index, portion) for index, shard in enumerate(runs))


def num_rows(pieces: Pieces) -> int:
    """Counts the tokens in the pieces of a shard."""
    return count_rows(tuple(rows for _, rows in pieces))


def count_rows(slices: Slices) -> int:
    """Counts the rows in some slices."""
    return sum(rows.stop - rows.start for rows in slices)


def select(whole: Tensor, runs: Sequence[Runs], view: View) -> Iterator[Tensor]:
    """Yields the parts of a buffer, which holds the rows of all shards, that belong to a view."""
    starts = offsets([sum(length for _, length in shard) for shard in runs])
    for start, pieces in zip(starts, view, strict=True):
        for rows in _joined(rows for _, rows in pieces):
            yield whole[start + rows.start : start + rows.stop]


def _joined(parts: Iterator[slice]) -> Slices:
    """Joins sorted slices into as few as possible."""
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
        blocks: for each block of the others and each rank, the rows of that block that it is sent.
        taken: how many blocks a step sends; the next step continues with the block after them, in a circle.
    """

    always: tuple[Slices, ...]
    blocks: tuple[tuple[Slices, ...], ...]
    taken: int

    @property
    def takes_turns(self) -> bool:
        """Says whether a step leaves rows out."""
        return self.taken < len(self.blocks)

    def due(self, step: int, layer: int) -> tuple[Slices, ...]:
        """Returns for each rank the rows it is sent in a step; layers start with different blocks."""
        first = (step + layer) * self.taken
        turn = [self.blocks[(first + number) % len(self.blocks)] for number in range(self.taken)]
        by_rank = zip(*turn, strict=True)
        return tuple((*always, *chain(*parts)) for always, parts in zip(self.always, by_rank, strict=True))

    def counts(self, step: int, layer: int) -> tuple[int, ...]:
        """Counts for each rank the rows it is sent in a step."""
        return tuple(map(count_rows, self.due(step, layer)))


@functools.lru_cache(maxsize=4096)
def rotation_of(runs: tuple[Runs, ...], sender: int, portion: float, far: float) -> Rotation:
    """Plans what one rank sends in each step.

    A step's budget, in rows, is what the busiest rank would send if all ranks sent each other the rows `visible` within
    `portion`, and at least a row for each rank. The image tokens' share of it that is not reserved for far rows is
    spent on the tokens nearest to each rank, in every step. All other rows, and all text, are cut into blocks that take
    turns, equally many for each rank. The number of blocks, and how many of them a step sends, are chosen to use most
    of the budget. With ``far=1`` a block has the same rows for all ranks.

    Args:
        runs: the token runs of every shard.
        sender: the rank that sends.
        portion: how many patches far the budget would reach; infinity sends everything in every step.
        far: share of the budget that takes turns, above 0.

    Example:
        >>> runs = ((("image", 10),), (("image", 10),))
        >>> rotation = rotation_of(runs, 0, 0.4, 0.5)  # 4 rows in each step: the 2 nearest always, 8 in 4 turns
        >>> [rotation.due(step, 0)[1] for step in range(2)]
        [(slice(8, 10, None), slice(0, 2, None)), (slice(8, 10, None), slice(2, 4, None))]
    """
    others, own = [viewer for viewer in range(len(runs)) if viewer != sender], runs[sender]
    always: list[Slices] = [()] * len(runs)
    for viewer in others:
        count = math.floor((1.0 - far) * _reach(own, viewer - sender, portion) + 1e-9)
        nearest = _nearest(own, viewer - sender, count)
        always[viewer] = _joined(part for stream, part in nearest if stream == IMAGE)
    rest = [_without(own, always[viewer]) if viewer != sender else () for viewer in range(len(runs))]
    budget = max(_rows_within(runs, index, portion) for index in range(len(runs))) - sum(map(count_rows, always))
    taken, number = _blocks(tuple(map(count_rows, rest)), max(budget, len(others)))
    return Rotation(tuple(always), tuple(zip(*(_cut(rows, number) for rows in rest), strict=True)), taken)


def _rows_within(runs: tuple[Runs, ...], sender: int, portion: float) -> int:
    return sum(num_rows(visible(runs[sender], v - sender, portion)) for v in range(len(runs)) if v != sender)


def _blocks(rows: Sequence[int], budget: int) -> tuple[int, int]:
    """Returns how many blocks there are and how many a step sends: few blocks that use most of the budget."""
    total, most = sum(rows), max(rows)
    if total <= budget:
        return 1, 1
    best = Fraction(0)
    for number in range(1, max(MOST_BLOCKS, math.ceil(most / (budget // len(rows) or 1))) + 1):
        sizes = [split_sizes(count, number) for count in rows]  # longer ones first, so the first turn has most rows
        taken = budget * number // total
        while sum(sum(parts[:taken]) for parts in sizes) > budget:
            taken -= 1
        if Fraction(taken, number) > best:
            best, chosen = Fraction(taken, number), (taken, number)
    return chosen


def _without(shard: Runs, taken: Slices) -> Slices:
    """Returns the rows of a shard that some sorted slices do not cover."""
    edges = [0, *chain.from_iterable((rows.start, rows.stop) for rows in taken)]
    edges.append(sum(length for _, length in shard))
    return _joined(slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def _cut(slices: Slices, number: int) -> list[Slices]:
    """Cuts rows, given as slices, into blocks as even as possible."""
    left, blocks = list(reversed(slices)), []
    for size in split_sizes(count_rows(slices), number):
        block: list[slice] = []
        while size:
            rows = left.pop()
            stop = min(rows.stop, rows.start + size)
            block.append(slice(rows.start, stop))
            size -= stop - rows.start
            if stop < rows.stop:
                left.append(slice(stop, rows.stop))
        blocks.append(tuple(block))
    return blocks
