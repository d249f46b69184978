"""Swaps tokens for heads, so that every rank attends over all tokens for a share of the heads (arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from partsong.knobs import Count
from partsong.parallel.attention_call import AttentionCall, AttentionShape, Inner, Stage, mask_rows, merged_runs
from partsong.parallel.exchange.wire_messages import exchange_by_wire
from partsong.parallel.exchange.wired import Wired
from partsong.parallel.exchange.wires import Wire, WireName, bytes_sent, wire_of
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import Pending, fused_all_to_all
from partsong.parallel.ranks.mesh import Axis, Mesh
from partsong.parallel.ranks.shards import offsets, split_sizes

__all__ = ["Ulysses", "UlyssesStage"]

#: Queries of a tile of attention kernels, and the tiles a wave has at least on a GPU: two for each multiprocessor of
#: the largest. Fewer would leave a part of it idle in every wave, and cost more than waiting for the exchange.
TILE_ROWS, TILES = 128, 264


@dataclass(frozen=True, kw_only=True, slots=True)
class Ulysses(Wired):
    """Splits tokens over ranks and swaps tokens for heads around each self-attention. Exact.

    A rank's heads are exchanged in waves. While one wave is computed, the next arrives and the last one's outputs
    travel back, so a rank waits only for the first arrival and the last return. Each wave takes two
    messages per peer: queries, keys and values together, then the outputs. Heads and tokens that do not divide are
    shared unevenly, and grouped key/value heads go where they are needed.

    Use it when the ranks are in one machine with fast links and there are no more of them than attention heads.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        waves: number of exchanges for the heads of a rank; some are empty on a rank with fewer groups of heads. On a
            GPU there are fewer where the tokens of a wave would leave it idle.
        wire: ``fp8`` and ``int8`` round what travels, with a scale for each token and head (docs/wires.md), which is
            approximate.

    Source: DeepSpeed-Ulysses, arXiv 2309.14509; the waves are partsong's.

    Example:
        >>> Ulysses().kind, Ulysses(wire="int8").kind
        ('exact', 'approximate')
    """

    axes: ClassVar[tuple[str, ...]] = ("ulysses",)
    uneven_axes: ClassVar[tuple[str, ...]] = ("ulysses",)
    travels: ClassVar[str] = "queries, keys, values and outputs"

    degree: Count | None = None
    waves: Count = 2
    wire: WireName = "none"

    def stages(self, mesh: Mesh, clock: StepClock) -> list[UlyssesStage]:
        """Returns the attention stages this strategy adds to a plan."""
        return [UlyssesStage(mesh.axis("ulysses"), self.waves, wire_of(self.wire))]


@dataclass(frozen=True, slots=True)
class _Share:
    """Holds the heads one rank attends for: queries `[q0, q1)` and the key/value heads `[k0, k1)` they read."""

    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def queries(self) -> int:
        return self.q1 - self.q0

    @property
    def keys(self) -> int:
        return self.k1 - self.k0

    @property
    def rows(self) -> int:
        return self.queries + 2 * self.keys

    def is_aligned(self, group: int) -> bool:
        return self.q0 % group == 0 and self.q1 % group == 0


def _shares(first: int, sizes: Sequence[int], group: int) -> list[_Share]:
    """Cuts query heads, from `first` on, into runs, each with the key/value heads that its queries read."""
    shares = []
    for size in sizes:
        last = first + size
        shares.append(_Share(first, last, first // group, -(-last // group) if size else first // group))
        first = last
    return shares


def head_shares(heads: int, kv_heads: int, axis: Axis) -> list[_Share]:
    """Cuts query heads into runs, one for each rank: even ones, or by the shares of the ranks, in whole heads."""
    return _shares(0, axis.split(heads), heads // kv_heads)


def in_waves(share: _Share, group: int, waves: int) -> list[_Share]:
    """Cuts a share into `waves` runs, of which some may be empty; all heads of a key/value group stay together."""
    if share.is_aligned(group):
        return _shares(share.q0, [kv_heads * group for kv_heads in split_sizes(share.keys, waves)], group)
    return _shares(share.q0, [share.queries] + [0] * (waves - 1), group)


@dataclass(frozen=True, slots=True)
class _Wave:
    """Holds one exchange: the heads of every rank, and the ranks whose heads one copy packs or unpacks.

    Attributes:
        shares: the heads of each rank.
        runs: neighbouring ranks whose shares have one size and lie evenly apart.
    """

    shares: tuple[_Share, ...]
    runs: tuple[range, ...]


def _runs(shares: Sequence[_Share], left_out: int | None) -> tuple[range, ...]:
    """Finds ranks whose shares have one size and lie evenly apart, so that one copy packs the heads of all of them."""
    runs: list[range] = []
    for peer, share in enumerate(shares):
        if peer == left_out or not share.rows:
            continue
        if runs and runs[-1].stop == peer and _continues(shares, runs[-1], share):
            runs[-1] = range(runs[-1].start, peer + 1)
        else:
            runs.append(range(peer, peer + 1))
    return tuple(runs)


def _continues(shares: Sequence[_Share], run: range, share: _Share) -> bool:
    last = shares[run[-1]]
    step = (share.q0 - last.q0, share.k0 - last.k0)
    return (last.queries, last.keys) == (share.queries, share.keys) and (len(run) == 1 or step == _step(shares, run))


def _step(shares: Sequence[_Share], run: range) -> tuple[int, int]:
    """Returns how many query heads and how many key heads lie between the shares of a run."""
    if len(run) == 1:
        return 0, 0
    first, second = shares[run[0]], shares[run[1]]
    return second.q0 - first.q0, second.k0 - first.k0


class UlyssesStage(Stage):
    """Swaps tokens for heads, lets `inner` attend, and swaps back, one wave of heads after the other."""

    def __init__(self, axis: Axis, waves: int = 2, wire: Wire | None = None) -> None:
        self.axis, self.waves, self.wire = axis, waves, wire
        #: Where the ranks' library does not move all parts at once, this rank's own heads are packed where they stay.
        self.left_out = None if wire is None and axis.is_fused else axis.index
        self._waves: dict[tuple[int, int, int], list[_Wave]] = {}

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Attends over all tokens of this axis' group, for this rank's heads."""
        (batch, heads, length, dim), kv_heads, size = call.q.shape, call.k.shape[1], self.axis.size
        group = heads // kv_heads
        whole = call.q.new_empty((length, batch, heads, dim))
        waves = self._cut(call)
        outer = self._outer(call)
        if call.masks is not None:
            starts = range(0, len(call.masks), size)
            outer["masks"] = tuple(torch.cat(call.masks[start : start + size], dim=-1) for start in starts)
        if call.whole_mask is not None:  # the queries of all ranks of this axis
            outer["masks"] = mask_rows(call.whole_mask, outer["sizes"], outer["index"])
        arriving = [self._scatter(call, wave) for wave in waves]
        leaving = []
        for number, (wave, (arrived, pending)) in enumerate(zip(waves, arriving, strict=True)):
            mine = wave.shares[self.axis.index]
            pending.wait()
            q, k, v = _unpack(arrived, mine, group)
            out = q  # no heads in this wave, but the others' outputs still come back
            if mine.rows or number == 0:  # inner stages may involve all ranks: every rank calls them at least once
                out = inner(replace(call, q=q, k=k, v=v, wave=call.wave * self.waves + number, **outer))
            leaving.append(self._collect(out, wave, call, whole))
        for finish in leaving:
            finish()
        return whole.permute(1, 2, 0, 3)

    def _cut(self, call: AttentionCall) -> list[_Wave]:
        """Cuts the heads into waves, and remembers how."""
        heads, kv_heads = call.q.shape[1], call.k.shape[1]
        number = self.waves
        if number > 1 and (call.q.is_cuda or (self.axis.dry and self.axis.is_fused)):
            tiles = call.q.shape[0] * -(-heads // self.axis.size) * -(-sum(self._token_counts(call)) // TILE_ROWS)
            number = min(number, max(tiles // TILES, 1))
        key = heads, kv_heads, number
        if key not in self._waves:
            shares = head_shares(heads, kv_heads, self.axis)
            by_rank = [in_waves(share, heads // kv_heads, number) for share in shares]
            self._waves[key] = [_Wave(wave, _runs(wave, self.left_out)) for wave in zip(*by_rank, strict=True)]
        return self._waves[key]

    def _token_counts(self, call: AttentionCall | AttentionShape) -> tuple[int, ...]:
        first = call.index - call.index % self.axis.size
        return call.sizes[first : first + self.axis.size]

    def _outer(self, call: AttentionCall | AttentionShape) -> dict[str, Any]:
        """Describes the shards that are still separate once this axis' ranks have joined theirs."""
        size = self.axis.size
        sizes = tuple(sum(call.sizes[start : start + size]) for start in range(0, len(call.sizes), size))
        return {"sizes": sizes, "runs": merged_runs(call.runs, size), "index": call.index // size}

    def _scatter(self, call: AttentionCall, wave: _Wave) -> tuple[Tensor, Pending]:
        # Tokens are the first dimension, so what peers send arrives in place and needs no copy.
        me, tokens, (batch, _, length, dim) = self.axis.index, self._token_counts(call), call.q.shape
        rows = wave.shares[me].rows
        arrived = call.q.new_empty((sum(tokens), batch, rows, dim))
        counts = [length * batch * share.rows * dim for share in wave.shares]
        if self.left_out is not None:
            counts[me] = 0
        packed = call.q.new_empty(sum(counts))
        for run, part in zip(wave.runs, _by_run(packed, counts, wave.runs), strict=True):
            _pack(part.view(len(run), length, batch, -1, dim), call, wave.shares, run)
        received = [count * batch * rows * dim for count in tokens]
        pending = self._swap(packed, counts, arrived, received, "Ulysses: tokens to heads")
        if self.left_out is not None and rows:  # own rows while the others' are in transit
            own = arrived.split(list(tokens))[me]
            _pack(own[None], call, wave.shares, range(me, me + 1))
        return arrived, pending

    def _swap(self, send: Tensor, sent: Sequence[int], recv: Tensor, received: Sequence[int], name: str) -> Pending:
        send, dim, recv = send.view(-1), recv.shape[-1], recv.view(-1)
        if self.left_out is None:
            return fused_all_to_all(self.axis, send, sent, recv, received, name=name)
        outgoing, incoming = (
            {peer: part.view(-1, dim) for peer, part in enumerate(parts) if peer != self.left_out}
            for parts in (send.split(list(sent)), recv.split(list(received)))
        )
        return exchange_by_wire(self.axis, outgoing, incoming, self.wire, name=name)

    def _collect(self, out: Tensor, wave: _Wave, call: AttentionCall, whole: Tensor) -> Callable[[], None]:
        me, tokens, (length, batch, _, dim) = self.axis.index, self._token_counts(call), whole.shape
        packed, mine = out.permute(2, 0, 1, 3).contiguous(), wave.shares[me]
        sent = [count * batch * mine.queries * dim for count in tokens]
        counts = [length * batch * share.queries * dim for share in wave.shares]
        if self.left_out is not None:
            counts[me] = 0
        arrived = out.new_empty((sum(counts) // dim, dim))
        pending = self._swap(packed, sent, arrived, counts, "Ulysses: heads to tokens")
        if self.left_out is not None:
            whole[:, :, mine.q0 : mine.q1] = packed.split(list(tokens))[me]

        def finish() -> None:
            pending.wait()
            heads = whole.permute(1, 2, 0, 3)
            for run, part in zip(wave.runs, _by_run(arrived.view(-1), counts, wave.runs), strict=True):
                first, (step, _) = wave.shares[run[0]], _step(wave.shares, run)
                target = _heads(heads, first.q0, first.queries, len(run), step)
                target.copy_(part.view(target.shape))

        return finish

    def predict(self, shape: AttentionShape) -> tuple[int, tuple[AttentionShape, ...]]:
        """Returns the bytes this rank sends: q, k, v of the others' heads, then outputs of the others' tokens."""
        me, tokens = shape.index % self.axis.size, self._token_counts(shape)
        shares = head_shares(shape.heads, shape.kv_heads, self.axis)
        mine = shares[me]
        there = sum(share.rows for peer, share in enumerate(shares) if peer != me) * tokens[me]
        back = mine.queries * (sum(tokens) - tokens[me])
        sent = bytes_sent(self.wire, ((there + back) * shape.batch, shape.head_dim), shape.itemsize)
        outer, group = self._outer(shape), shape.heads // shape.kv_heads
        return sent, tuple(
            replace(shape, heads=part.queries, kv_heads=part.keys if part.is_aligned(group) else part.queries, **outer)
            for wave, part in enumerate(in_waves(mine, group, self.waves))
            if part.rows or wave == 0
        )


def _by_run(flat: Tensor, counts: Sequence[int], runs: Sequence[range]) -> list[Tensor]:
    """Returns the part of a flat tensor for every run of ranks, where `counts` numbers lie for each rank."""
    starts = offsets(counts)
    return [flat[starts[run[0]] : starts[run[-1]] + counts[run[-1]]] for run in runs]


def _heads(x: Tensor, first: int, count: int, number: int, step: int) -> Tensor:
    """Returns a view `[number, L, B, count, D]` of `[B, H, L, D]`: runs of `count` heads, `step` heads apart."""
    (batch, _, length, dim), (by_batch, by_head, by_row, by_column) = x.shape, x.stride()
    steps = (step * by_head, by_row, by_batch, by_head, by_column)
    return x.as_strided((number, length, batch, count, dim), steps, x.storage_offset() + first * by_head)


def _pack(target: Tensor, call: AttentionCall, shares: Sequence[_Share], run: range) -> None:
    """Writes queries, keys and values of a run of ranks into `[ranks, L, B, heads, D]`."""
    first, (q_step, k_step), number = shares[run[0]], _step(shares, run), len(run)
    queries, keys, values = target.split([first.queries, first.keys, first.keys], dim=3)
    queries.copy_(_heads(call.q, first.q0, first.queries, number, q_step))
    keys.copy_(_heads(call.k, first.k0, first.keys, number, k_step))
    values.copy_(_heads(call.v, first.k0, first.keys, number, k_step))


def _unpack(arrived: Tensor, share: _Share, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Takes queries, keys and values out of the rows that arrived.

    Where a run of query heads cuts through a group, key/value heads are repeated, so that all groups are whole.
    """
    counts = [share.queries, share.keys, share.keys]
    q, k, v = (part.permute(1, 2, 0, 3) for part in arrived.split(counts, dim=2))
    if share.is_aligned(group):
        return q, k, v
    index = torch.arange(share.q0, share.q1, device=k.device) // group - share.k0
    return q, k[:, index], v[:, index]
