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
from partsong.parallel.ranks.collectives import Pending
from partsong.parallel.ranks.mesh import Axis, Mesh
from partsong.parallel.ranks.shards import split_sizes

__all__ = ["Ulysses", "UlyssesStage"]


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
        waves: number of exchanges for the heads of a rank; some are empty on a rank with fewer groups of heads.
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


class UlyssesStage(Stage):
    """Swaps tokens for heads, lets `inner` attend, and swaps back, one wave of heads after the other."""

    def __init__(self, axis: Axis, waves: int = 2, wire: Wire | None = None) -> None:
        self.axis, self.waves, self.wire = axis, waves, wire

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Attends over all tokens of this axis' group, for this rank's heads."""
        (batch, heads, length, dim), kv_heads, size = call.q.shape, call.k.shape[1], self.axis.size
        group = heads // kv_heads
        whole = call.q.new_empty((length, batch, heads, dim))
        by_rank = [in_waves(share, group, self.waves) for share in head_shares(heads, kv_heads, self.axis)]
        waves = list(zip(*by_rank, strict=True))
        outer = self._outer(call)
        if call.masks is not None:
            starts = range(0, len(call.masks), size)
            outer["masks"] = tuple(torch.cat(call.masks[start : start + size], dim=-1) for start in starts)
        if call.whole_mask is not None:  # the queries of all ranks of this axis
            outer["masks"] = mask_rows(call.whole_mask, outer["sizes"], outer["index"])
        arriving = [self._scatter(call, shares) for shares in waves]
        leaving = []
        for wave, (shares, (arrived, pending)) in enumerate(zip(waves, arriving, strict=True)):
            mine = shares[self.axis.index]
            pending.wait()
            q, k, v = _unpack(arrived, mine, group)
            out = q  # no heads in this wave, but the others' outputs still come back
            if mine.rows or wave == 0:  # inner stages may involve all ranks, so every rank calls them at least once
                out = inner(replace(call, q=q, k=k, v=v, wave=call.wave * self.waves + wave, **outer))
            leaving.append(self._collect(out, shares, call, whole))
        for finish in leaving:
            finish()
        return whole.permute(1, 2, 0, 3)

    def _token_counts(self, call: AttentionCall | AttentionShape) -> tuple[int, ...]:
        first = call.index - call.index % self.axis.size
        return call.sizes[first : first + self.axis.size]

    def _outer(self, call: AttentionCall | AttentionShape) -> dict[str, Any]:
        """Describes the shards that are still separate once this axis' ranks have joined theirs."""
        size = self.axis.size
        sizes = tuple(sum(call.sizes[start : start + size]) for start in range(0, len(call.sizes), size))
        return {"sizes": sizes, "runs": merged_runs(call.runs, size), "index": call.index // size}

    def _scatter(self, call: AttentionCall, shares: Sequence[_Share]) -> tuple[Tensor, Pending]:
        # Tokens are the first dimension, so what peers send arrives in place and needs no copy.
        me, tokens, batch, dim = self.axis.index, self._token_counts(call), call.q.shape[0], call.q.shape[3]
        arrived = call.q.new_empty((sum(tokens), batch, shares[me].rows, dim))
        recvs = arrived.split(list(tokens))
        sends = [
            recvs[peer] if peer == me else call.q.new_empty((tokens[me], batch, share.rows, dim))
            for peer, share in enumerate(shares)
        ]
        for peer in (p for p in range(self.axis.size) if p != me):
            _pack(sends[peer], call, shares[peer])
        pending = self._swap(sends, recvs, "Ulysses: tokens to heads")
        _pack(recvs[me], call, shares[me])  # own rows while the others' are in transit
        return arrived, pending

    def _swap(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], name: str) -> Pending:
        outgoing, incoming = (
            {peer: part for peer, part in enumerate(parts) if peer != self.axis.index} for parts in (sends, recvs)
        )
        return exchange_by_wire(self.axis, outgoing, incoming, self.wire, name=name)

    def _collect(self, out: Tensor, shares: Sequence[_Share], call: AttentionCall, whole: Tensor) -> Callable[[], None]:
        me, tokens, (batch, _, _, dim) = self.axis.index, self._token_counts(call), out.shape
        sends = out.permute(2, 0, 1, 3).contiguous().split(list(tokens))
        recvs = [
            sends[me] if peer == me else out.new_empty((tokens[me], batch, share.queries, dim))
            for peer, share in enumerate(shares)
        ]
        pending = self._swap(sends, recvs, "Ulysses: heads to tokens")
        whole[:, :, shares[me].q0 : shares[me].q1] = sends[me]

        def finish() -> None:
            pending.wait()
            for peer, share in enumerate(shares):
                if peer != me:
                    whole[:, :, share.q0 : share.q1] = recvs[peer]

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


def _pack(target: Tensor, call: AttentionCall, share: _Share) -> None:
    queries, keys = share.queries, share.keys
    target[:, :, :queries] = call.q[:, share.q0 : share.q1].permute(2, 0, 1, 3)
    target[:, :, queries : queries + keys] = call.k[:, share.k0 : share.k1].permute(2, 0, 1, 3)
    target[:, :, queries + keys :] = call.v[:, share.k0 : share.k1].permute(2, 0, 1, 3)


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
