"""Ulysses: every rank attends for a share of the heads, over all tokens (arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from partsong.knobs import Count
from partsong.parallel.attention_call import AttentionCall, AttentionShape, Inner, Stage, merged_runs
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import Pending, all_to_all
from partsong.parallel.ranks.mesh import Axis, Mesh
from partsong.parallel.ranks.shards import offsets, split_sizes
from partsong.parallel.strategy import Strategy

__all__ = ["Ulysses", "UlyssesStage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ulysses(Strategy):
    """Splits tokens over ranks and swaps tokens for heads around each self-attention. Exact.

    A rank's heads are exchanged in waves: while one wave is computed, the next is on its way in and the last one's
    outputs are on their way back, so only the first way in and the last way back are waited for. Two messages per
    peer and wave: queries, keys and values together, then the outputs. Any number of heads and tokens; heads that do
    not divide are shared unevenly, and grouped key/value heads go where they are needed.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        waves: exchanges the heads of a rank are dealt out to, at least 1; a rank with fewer (groups of) heads has
            that many.

    Source: DeepSpeed-Ulysses, arXiv 2309.14509; the waves are partsong's.

    Example:
        >>> Ulysses(degree=2).degree
        2
    """

    axes: ClassVar[tuple[str, ...]] = ("ulysses",)

    degree: Count | None = None
    waves: Count = 2

    def stages(self, mesh: Mesh, clock: StepClock) -> list[UlyssesStage]:
        """The attention stages this strategy adds to a plan."""
        return [UlyssesStage(mesh.axis("ulysses"), self.waves)]


@dataclass(frozen=True, slots=True)
class _Share:
    """The heads one rank attends for: queries `[q0, q1)` and the key/value heads `[k0, k1)` they read."""

    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def rows(self) -> int:
        return (self.q1 - self.q0) + 2 * (self.k1 - self.k0)


def head_shares(heads: int, kv_heads: int, parts: int) -> list[_Share]:
    """Query heads in even runs, each with the key/value heads its queries read (none for an empty run)."""
    group = heads // kv_heads
    sizes = split_sizes(heads, parts)
    shares = []
    for start, size in zip(offsets(sizes), sizes, strict=True):
        stop = start + size
        shares.append(_Share(start, stop, start // group, -(-stop // group) if size else start // group))
    return shares


def in_waves(share: _Share, group: int, waves: int) -> list[_Share]:
    """A share dealt out to `waves` runs (some may be empty), none of which cuts a key/value group in two."""
    if not _is_aligned(share, group):
        sizes = [share.q1 - share.q0] + [0] * (waves - 1)
    else:
        sizes = [kv_heads * group for kv_heads in split_sizes(share.k1 - share.k0, waves)]
    runs = []
    for start, size in zip(offsets(sizes), sizes, strict=True):
        first, last = share.q0 + start, share.q0 + start + size
        runs.append(_Share(first, last, first // group, -(-last // group) if size else first // group))
    return runs


class UlyssesStage(Stage):
    """Swaps tokens for heads, lets `inner` attend, and swaps back, one wave of heads after the other."""

    def __init__(self, axis: Axis, waves: int = 2) -> None:
        self.axis, self.waves = axis, waves

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Attention over all tokens of this axis' group for this rank's heads."""
        (batch, heads, length, dim), kv_heads = call.q.shape, call.k.shape[1]
        group = heads // kv_heads
        whole = call.q.new_empty((length, batch, heads, dim))
        by_rank = [in_waves(share, group, self.waves) for share in head_shares(heads, kv_heads, self.axis.size)]
        waves = list(zip(*by_rank, strict=True))
        outer = self._outer(call)
        arriving = [self._scatter(call, shares) for shares in waves]
        leaving = []
        for wave, (shares, (arrived, pending)) in enumerate(zip(waves, arriving, strict=True)):
            mine = shares[self.axis.index]
            pending.wait()
            q, k, v = _unpack(arrived, mine, group)
            out = q  # no heads in this wave, but the others' outputs still come back
            if mine.rows or wave == 0:  # inner stages may meet all ranks, so every rank calls them once at least
                out = inner(replace(call, q=q, k=k, v=v, wave=call.wave * self.waves + wave, **outer))
            leaving.append(self._collect(out, shares, call, whole))
        for finish in leaving:
            finish()
        return whole.permute(1, 2, 0, 3)

    def _token_counts(self, call: AttentionCall) -> tuple[int, ...]:
        first = call.index - self.axis.index
        return call.sizes[first : first + self.axis.size]

    def _outer(self, call: AttentionCall) -> dict[str, Any]:
        size = self.axis.size
        starts = range(0, len(call.sizes), size)
        masks = None
        if call.masks is not None:
            masks = tuple(torch.cat(call.masks[s : s + size], dim=-1) for s in starts)
        return {
            "sizes": tuple(sum(call.sizes[s : s + size]) for s in starts),
            "runs": merged_runs(call.runs, size),
            "index": call.index // size,
            "masks": masks,
        }

    def _scatter(self, call: AttentionCall, shares: Sequence[_Share]) -> tuple[Tensor, Pending]:
        # Rows run over tokens first, so what peers send lands in place and needs no copy on arrival.
        me, tokens, batch, dim = self.axis.index, self._token_counts(call), call.q.shape[0], call.q.shape[3]
        arrived = call.q.new_empty((sum(tokens), batch, shares[me].rows, dim))
        recvs = arrived.split(list(tokens))
        sends = [
            recvs[peer] if peer == me else call.q.new_empty((tokens[me], batch, share.rows, dim))
            for peer, share in enumerate(shares)
        ]
        for peer in (p for p in range(self.axis.size) if p != me):
            _pack(sends[peer], call, shares[peer])
        pending = all_to_all(self.axis, sends, recvs, name="Ulysses: tokens to heads")
        _pack(recvs[me], call, shares[me])  # own rows while the others' are under way
        return arrived, pending

    def _collect(self, out: Tensor, shares: Sequence[_Share], call: AttentionCall, whole: Tensor) -> Callable[[], None]:
        me, tokens, (batch, _, _, dim) = self.axis.index, self._token_counts(call), out.shape
        sends = out.permute(2, 0, 1, 3).contiguous().split(list(tokens))
        recvs = [
            sends[me] if peer == me else out.new_empty((tokens[me], batch, share.q1 - share.q0, dim))
            for peer, share in enumerate(shares)
        ]
        pending = all_to_all(self.axis, sends, recvs, name="Ulysses: heads to tokens")
        whole[:, :, shares[me].q0 : shares[me].q1] = sends[me]

        def finish() -> None:
            pending.wait()
            for peer, share in enumerate(shares):
                if peer != me:
                    whole[:, :, share.q0 : share.q1] = recvs[peer]

        return finish

    def predict(self, shape: AttentionShape) -> tuple[int, AttentionShape]:
        """Bytes this rank sends: q, k, v of the others' heads, then outputs of the others' tokens."""
        me, size = shape.index % self.axis.size, self.axis.size
        first = shape.index - me
        group = shape.sizes[first : first + size]
        shares = head_shares(shape.heads, shape.kv_heads, size)
        unit = shape.batch * shape.head_dim * shape.itemsize
        there = sum(share.rows for peer, share in enumerate(shares) if peer != me) * group[me]
        mine = shares[me]
        back = (mine.q1 - mine.q0) * (sum(group) - group[me])
        aligned = _is_aligned(mine, shape.heads // shape.kv_heads)
        inner = replace(
            shape,
            heads=mine.q1 - mine.q0,
            kv_heads=mine.k1 - mine.k0 if aligned else mine.q1 - mine.q0,
            sizes=tuple(sum(shape.sizes[s : s + size]) for s in range(0, len(shape.sizes), size)),
            runs=merged_runs(shape.runs, size),
            index=shape.index // size,
        )
        return (there + back) * unit, inner


def _pack(target: Tensor, call: AttentionCall, share: _Share) -> None:
    queries, keys = share.q1 - share.q0, share.k1 - share.k0
    target[:, :, :queries] = call.q[:, share.q0 : share.q1].permute(2, 0, 1, 3)
    target[:, :, queries : queries + keys] = call.k[:, share.k0 : share.k1].permute(2, 0, 1, 3)
    target[:, :, queries + keys :] = call.v[:, share.k0 : share.k1].permute(2, 0, 1, 3)


def _is_aligned(share: _Share, group: int) -> bool:
    return share.q0 % group == 0 and share.q1 % group == 0


def _unpack(arrived: Tensor, share: _Share, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values out of the rows that arrived.

    Key/value heads are repeated where a run of query heads cuts through a group, so that all groups are whole.
    """
    counts = [share.q1 - share.q0, share.k1 - share.k0, share.k1 - share.k0]
    q, k, v = (part.permute(1, 2, 0, 3) for part in arrived.split(counts, dim=2))
    if _is_aligned(share, group):
        return q, k, v
    index = torch.arange(share.q0, share.q1, device=k.device) // group - share.k0
    return q, k[:, index], v[:, index]
