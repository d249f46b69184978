"""Cuts attention heads over ranks and into waves, and plans the copies that pack them into messages.

A copy takes heads of several ranks at once, where they lie evenly apart: where heads divide evenly, one is enough for
all ranks. All numbers of a wave depend on shapes alone, so they are worked out once for all layers and steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import split_sizes

__all__ = ["HeadCopy", "Share", "Wave", "cut_waves", "head_shares", "in_waves"]


@dataclass(frozen=True, slots=True)
class Share:
    """Holds the heads one rank attends for: queries `[q0, q1)` and the key/value heads `[k0, k1)` they read."""

    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def queries(self) -> int:
        """Counts the query heads."""
        return self.q1 - self.q0

    @property
    def keys(self) -> int:
        """Counts the key heads."""
        return self.k1 - self.k0

    @property
    def rows(self) -> int:
        """Counts the heads of queries, keys and values."""
        return self.queries + 2 * self.keys

    def is_aligned(self, group: int) -> bool:
        """Says whether no group of query heads is cut through."""
        return self.q0 % group == 0 and self.q1 % group == 0


def _shares(first: int, sizes: Sequence[int], group: int) -> list[Share]:
    """Cuts query heads, from `first` on, into runs, each with the key/value heads that its queries read."""
    shares = []
    for size in sizes:
        last = first + size
        shares.append(Share(first, last, first // group, -(-last // group) if size else first // group))
        first = last
    return shares


def head_shares(heads: int, kv_heads: int, axis: Axis) -> list[Share]:
    """Cuts query heads into runs, one for each rank: even ones, or by the shares of the ranks, in whole heads."""
    return _shares(0, axis.split(heads), heads // kv_heads)


def in_waves(share: Share, group: int, waves: int) -> list[Share]:
    """Cuts a share into `waves` runs, of which some may be empty; all heads of a key/value group stay together."""
    if share.is_aligned(group):
        return _shares(share.q0, [kv_heads * group for kv_heads in split_sizes(share.keys, waves)], group)
    return _shares(share.q0, [share.queries] + [0] * (waves - 1), group)


@dataclass(frozen=True, slots=True)
class HeadCopy:
    """Describes a copy between heads `[B, H, L, D]` and a flat message, of runs of heads that lie evenly apart.

    Attributes:
        source: 0 for queries or outputs, 1 for keys, 2 for values.
        first: the first head.
        step: heads from one run to the next.
        shape: `[runs, L, B, heads, D]`.
        strides: of the copy in the message.
        start: where it begins in the message.
    """

    source: int
    first: int
    step: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def heads(self, x: Tensor) -> Tensor:
        """Returns these heads of `[B, H, L, D]`."""
        by_batch, by_head, by_row, by_column = x.stride()
        steps = (self.step * by_head, by_row, by_batch, by_head, by_column)
        return x.as_strided(self.shape, steps, x.storage_offset() + self.first * by_head)

    def part(self, message: Tensor) -> Tensor:
        """Returns their place in a flat message of its own memory."""
        return message.as_strided(self.shape, self.strides, self.start)


@dataclass(frozen=True, slots=True)
class Wave:
    """Holds one exchange of heads for tokens and back, as one rank sees it.

    Attributes:
        mine: this rank's heads.
        there: copies of queries, keys and values into the message that leaves.
        own: the same of this rank's own heads, into what arrives; empty where they travel too.
        back: copies of outputs out of the message that comes back.
        sent: numbers for each rank, queries, keys and values.
        received: numbers from each rank.
        returned: numbers of outputs from each rank.
        answered: numbers of outputs for each rank.
    """

    mine: Share
    there: tuple[HeadCopy, ...]
    own: tuple[HeadCopy, ...]
    back: tuple[HeadCopy, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    returned: tuple[int, ...]
    answered: tuple[int, ...]


def cut_waves(
    axis: Axis, q: tuple[int, ...], kv_heads: int, tokens: Sequence[int], waves: int, *, keeps_own: bool
) -> list[Wave]:
    """Plans all exchanges of one attention.

    Args:
        axis: the ranks.
        q: shape `[B, Hq, L, D]` of this rank's queries.
        kv_heads: key heads.
        tokens: tokens of each rank.
        waves: number of exchanges.
        keeps_own: whether this rank's own heads stay out of its messages.
    """
    batch, heads, length, dim = q
    group, me = heads // kv_heads, axis.index
    by_rank = [in_waves(share, group, waves) for share in head_shares(heads, kv_heads, axis)]
    planned = []
    for shares in zip(*by_rank, strict=True):
        mine, left_out = shares[me], me if keeps_own else None
        unit = length * batch * dim
        sent = [0 if peer == left_out else unit * share.rows for peer, share in enumerate(shares)]
        returned = [0 if peer == left_out else unit * share.queries for peer, share in enumerate(shares)]
        there = [copy for run in _runs(shares, left_out) for copy in _packing(shares, run, _start(sent, run), q)]
        before = sum(tokens[:me]) * batch * dim
        own = _packing(shares, range(me, me + 1), before * mine.rows, q) if keeps_own and mine.rows else []
        back = [_unpacking(shares, run, _start(returned, run), q) for run in _runs(shares, left_out)]
        counts = [count * batch * dim for count in tokens]
        received, answered = ([count * rows for count in counts] for rows in (mine.rows, mine.queries))
        numbers = (tuple(row) for row in (sent, received, returned, answered))
        planned.append(Wave(mine, tuple(there), tuple(own), tuple(back), *numbers))
    return planned


def _start(counts: Sequence[int], run: range) -> int:
    return sum(counts[: run.start])


def _unpacking(shares: Sequence[Share], run: range, start: int, q: tuple[int, ...]) -> HeadCopy:
    """Plans the copy of a run of ranks' outputs out of a message, from `start` on."""
    first, (step, _) = shares[run.start], _step(shares, run)
    return _copy(0, first.q0, step, len(run), (0, first.queries), start, q, first.queries)


def _packing(shares: Sequence[Share], run: range, start: int, q: tuple[int, ...]) -> list[HeadCopy]:
    """Plans the copies of queries, keys and values of a run of ranks into a message, from `start` on."""
    first, (q_step, k_step), number = shares[run.start], _step(shares, run), len(run)
    ends = (0, first.queries, first.queries + first.keys, first.rows)
    queries, keys, values = itertools.pairwise(ends)
    return [
        _copy(0, first.q0, q_step, number, queries, start, q, first.rows),
        _copy(1, first.k0, k_step, number, keys, start, q, first.rows),
        _copy(2, first.k0, k_step, number, values, start, q, first.rows),
    ]


def _copy(
    source: int,
    first: int,
    step: int,
    number: int,
    rows: tuple[int, int],
    start: int,
    q: tuple[int, ...],
    width: int,
) -> HeadCopy:
    """Plans a copy of heads to rows `rows` of a message that has `width` rows for each token and rank."""
    batch, _, length, dim = q
    shape = (number, length, batch, rows[1] - rows[0], dim)
    lines = (length, batch, width, dim)
    strides = tuple(math.prod(lines[place:]) for place in range(5))
    return HeadCopy(source, first, step, shape, strides, start + rows[0] * dim)


def _runs(shares: Sequence[Share], left_out: int | None) -> list[range]:
    """Finds ranks whose shares have one size and lie evenly apart, so that one copy packs the heads of all of them."""
    runs: list[range] = []
    for peer, share in enumerate(shares):
        if peer == left_out or not share.rows:
            continue
        if runs and runs[-1].stop == peer and _continues(shares, runs[-1], share):
            runs[-1] = range(runs[-1].start, peer + 1)
        else:
            runs.append(range(peer, peer + 1))
    return runs


def _continues(shares: Sequence[Share], run: range, share: Share) -> bool:
    last = shares[run[-1]]
    step = (share.q0 - last.q0, share.k0 - last.k0)
    return (last.queries, last.keys) == (share.queries, share.keys) and (len(run) == 1 or step == _step(shares, run))


def _step(shares: Sequence[Share], run: range) -> tuple[int, int]:
    """Returns how many query heads and how many key heads lie between the shares of a run."""
    if len(run) == 1:
        return 0, 0
    first, second = shares[run[0]], shares[run[1]]
    return second.q0 - first.q0, second.k0 - first.k0
