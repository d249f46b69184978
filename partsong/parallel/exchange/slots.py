"""Keeps keys and values for the next step, in buffers that are filled while the rank computes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from partsong.parallel.adapters.row import IMAGE
from partsong.parallel.attention_call import AttentionCall, Runs
from partsong.parallel.exchange.key_blocks import write_keys_values
from partsong.parallel.ranks.collectives import Pending, all_gather, exchange
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets

__all__ = ["Slots", "View", "num_rows", "select", "view_of", "visible"]

#: The rows of one shard as pieces (stream, rows), and those of every shard.
Pieces = tuple[tuple[str, slice], ...]
View = tuple[Pieces, ...]


def visible(shard: Runs, distance: int, portion: float) -> Pieces:
    """Returns the rows of a shard that a rank `distance` shards later (earlier where negative) sees.

    These are all text, and the image tokens within `portion` of a patch from the rank's border, rounded up. A portion
    above 1 covers the neighbour's patch and reaches into the next but one.

    Example:
        >>> visible((("text", 2), ("image", 10)), 1, 0.3)
        (('text', slice(0, 2, None)), ('image', slice(9, 12, None)))
    """
    total = sum(length for stream, length in shard if stream == IMAGE)
    reach = min(max(portion - abs(distance) + 1.0, 0.0), 1.0)
    count = math.ceil(reach * total - 1e-9)  # 1.3 - 1 is a little more than 0.3, and not one token more
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
    """Returns what one rank sees of every shard; of its own it sees everything."""
    return tuple(visible(shard, viewer - index, portion) for index, shard in enumerate(runs))


def num_rows(pieces: Pieces) -> int:
    """Counts the tokens in the pieces of a shard."""
    return sum(rows.stop - rows.start for _, rows in pieces)


def _joined(pieces: Pieces) -> list[slice]:
    """Joins the pieces into as few slices as possible."""
    joined: list[slice] = []
    for _, rows in pieces:
        if joined and joined[-1].stop == rows.start:
            joined[-1] = slice(joined[-1].start, rows.stop)
        elif rows.stop > rows.start:
            joined.append(rows)
    return joined


def select(whole: Tensor, runs: Sequence[Runs], view: View) -> Iterator[Tensor]:
    """Yields the parts of a buffer, which holds the rows of all shards, that belong to a view."""
    starts = offsets([sum(length for _, length in shard) for shard in runs])
    for start, pieces in zip(starts, view, strict=True):
        for rows in _joined(pieces):
            yield whole[start + rows.start : start + rows.stop]


class Slots:
    """Holds keys and values of the last steps for one layer and branch, and room to receive the next.

    `held` has the newest last. A buffer is reused only after the messages that read or fill it are done. Steps after
    the warm-up allocate none.

    Args:
        axis: the ranks.
        runs: the token runs of every shard.
        like: a block `[L, B, 2, H, D]` of any length.
        portion: how far this rank sees, in patches; infinity has no limit.
        order: steps to look back on before the last.
    """

    def __init__(self, axis: Axis, runs: tuple[Runs, ...], like: Tensor, portion: float, order: int) -> None:
        self.axis, self.runs, self._order = axis, runs, order
        self.held: list[Tensor] = []
        self._incoming: Tensor | None = None
        self._pending: Pending | None = None
        self._lay_out(like, portion)

    def _lay_out(self, like: Tensor, portion: float) -> None:
        me, self.portion = self.axis.index, portion
        self.view = view_of(self.runs, me, portion)
        self._sizes = tuple(map(num_rows, self.view))
        start = offsets(self._sizes)[me]
        self._own = slice(start, start + self._sizes[me])
        self._free = [_block(like, sum(self._sizes)) for _ in range(2 + self._order)]
        peers = (peer for peer in range(self.axis.size) if peer != me)
        self._outgoing = {peer: _Outgoing(visible(self.runs[me], peer - me, portion), like) for peer in peers}

    def narrow(self, portion: float) -> None:
        """Limits the view to `portion` from here on, when it had no limit so far."""
        self.settle()
        held, self.held = self.held, []
        self._lay_out(held[-1], portion)
        for whole in held:
            self._keep(whole)

    def gather(self, call: AttentionCall) -> Tensor:
        """Gathers the fresh rows of all ranks, in a step that waits for them; the view does not limit it."""
        self.settle()
        sees_all = sum(self._sizes) == sum(call.sizes)
        whole = self._free.pop() if sees_all else _block(self._free[-1], sum(call.sizes))
        write_keys_values(whole.split(list(call.sizes))[self.axis.index], call.k, call.v)
        all_gather(self.axis, whole, call.sizes, name="displaced patches, warm-up").wait()
        (self._hold if sees_all else self._keep)(whole)
        return whole

    def forecast(self, call: AttentionCall, ratio: float | None) -> Tensor:
        """Returns own fresh rows and a forecast of the others' in view; without a `ratio`, that is the last step's."""
        self.settle()
        if ratio is None or len(self.held) < 2:
            rows = self.held[-1]
        else:
            # The older step is not needed any more: last + ratio * (last - older) is written over it.
            rows, last = self.held.pop(0), self.held[-1]
            for others in (slice(0, self._own.start), slice(self._own.stop, None)):
                rows[others].lerp_(last[others], 1.0 + ratio)
            self._free.append(rows)
        write_keys_values(rows[self._own], call.k, call.v)
        return rows

    def send(self, rows: Tensor) -> None:
        """Sends each peer what it sees of this rank's rows, and receives rows to read in the next step."""
        spare = next(buffer for buffer in self._free if buffer is not rows)
        self._free = [buffer for buffer in self._free if buffer is not spare]
        self._incoming = spare
        places = spare.split(list(self._sizes))
        sends = {peer: outgoing.of(rows[self._own]) for peer, outgoing in self._outgoing.items()}
        recvs = {peer: places[peer] for peer in self._outgoing}
        self._pending = exchange(self.axis, sends, recvs, name="displaced patches")

    def settle(self) -> None:
        """Waits for the messages of the last step."""
        if self._pending is not None and self._incoming is not None:
            self._pending.wait()
            self._hold(self._incoming)
            self._pending = self._incoming = None

    @property
    def is_empty(self) -> bool:
        """Says whether nothing old can be read, now or after a wait."""
        return not self.held and self._pending is None

    def _keep(self, whole: Tensor) -> None:
        rows = self._free.pop()
        torch.cat(list(select(whole, self.runs, self.view)), out=rows)
        self._hold(rows)

    def _hold(self, rows: Tensor) -> None:
        self.held.append(rows)
        if len(self.held) > 1 + self._order:
            self._free.append(self.held.pop(0))


class _Outgoing:
    """Puts what one peer sees of this rank's rows into one piece of memory."""

    def __init__(self, pieces: Pieces, like: Tensor) -> None:
        self._slices = _joined(pieces)
        # Rows that lie together are sent from where they are; others are first copied into one buffer.
        self._packed = _block(like, 0 if len(self._slices) == 1 else num_rows(pieces))

    def of(self, own: Tensor) -> Tensor:
        if len(self._slices) == 1:
            return own[self._slices[0]]
        if self._slices:
            torch.cat([own[rows] for rows in self._slices], out=self._packed)
        return self._packed


def _block(like: Tensor, num: int) -> Tensor:
    return like.new_empty((num, *like.shape[1:]))
