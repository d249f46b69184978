"""Ulysses: every rank attends for a share of the heads, over all tokens (arXiv 2309.14509)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from partsong.parallel.collectives import all_to_all
from partsong.parallel.mesh import Axis, Mesh
from partsong.parallel.sequence import AttentionCall, AttentionShape
from partsong.parallel.shards import offsets, split_sizes
from partsong.parallel.strategy import Strategy

__all__ = ["Ulysses", "UlyssesStage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ulysses(Strategy):
    """Splits tokens over ranks and swaps tokens for heads around each self-attention. Exact.

    Two messages per peer and attention: queries, keys and values together, then the outputs. Any number of heads and
    tokens; heads that do not divide are shared unevenly, and grouped key/value heads go where they are needed.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.

    Source: DeepSpeed-Ulysses, arXiv 2309.14509.

    Example:
        >>> Ulysses(degree=2).degree
        2
    """

    axes: ClassVar[tuple[str, ...]] = ("ulysses",)

    degree: int | None = None

    def stages(self, mesh: Mesh) -> list[UlyssesStage]:
        """The attention stages this strategy adds to a plan."""
        return [UlyssesStage(mesh.axis("ulysses"))]


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


class UlyssesStage:
    """Swaps tokens for heads, lets `inner` attend, and swaps back."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def run(self, call: AttentionCall, inner: Any) -> Tensor:
        """Attention over all tokens of this axis' group for this rank's heads."""
        heads, kv_heads = call.q.shape[1], call.k.shape[1]
        shares = head_shares(heads, kv_heads, self.axis.size)
        first = call.index - self.axis.index
        group = call.sizes[first : first + self.axis.size]
        q, k, v = self._scatter(call, shares, group)
        k, v = _per_query_head(k, v, shares[self.axis.index], heads // kv_heads)
        out = inner(replace(call, q=q, k=k, v=v, **self._outer(call)))
        return self._collect(out, shares, group)

    def _outer(self, call: AttentionCall) -> dict[str, Any]:
        size = self.axis.size
        starts = range(0, len(call.sizes), size)
        masks = None
        if call.masks is not None:
            masks = tuple(torch.cat(call.masks[s : s + size], dim=-1) for s in starts)
        return {
            "sizes": tuple(sum(call.sizes[s : s + size]) for s in starts),
            "index": call.index // size,
            "masks": masks,
        }

    def _scatter(self, call: AttentionCall, shares: list[_Share], group: tuple[int, ...]) -> list[Tensor]:
        # Rows run over tokens first, so what peers send lands in place and needs no copy on arrival.
        me, batch, dim = self.axis.index, call.q.shape[0], call.q.shape[3]
        mine = shares[me]
        whole = call.q.new_empty((sum(group), batch, mine.rows, dim))
        recvs = whole.split(list(group))
        sends = [
            recvs[peer] if peer == me else call.q.new_empty((group[me], batch, share.rows, dim))
            for peer, share in enumerate(shares)
        ]
        for peer in (p for p in range(self.axis.size) if p != me):
            _pack(sends[peer], call, shares[peer])
        pending = all_to_all(self.axis, sends, recvs, name="Ulysses: tokens to heads")
        _pack(recvs[me], call, mine)  # own rows while the others' are under way
        pending.wait()
        counts = [mine.q1 - mine.q0, mine.k1 - mine.k0, mine.k1 - mine.k0]
        return [part.permute(1, 2, 0, 3) for part in whole.split(counts, dim=2)]

    def _collect(self, out: Tensor, shares: list[_Share], group: tuple[int, ...]) -> Tensor:
        me, (batch, _, _, dim) = self.axis.index, out.shape
        sends = out.permute(2, 0, 1, 3).contiguous().split(list(group))
        recvs = [
            sends[me] if peer == me else out.new_empty((group[me], batch, share.q1 - share.q0, dim))
            for peer, share in enumerate(shares)
        ]
        pending = all_to_all(self.axis, sends, recvs, name="Ulysses: heads to tokens")
        whole = out.new_empty((group[me], batch, shares[-1].q1, dim))
        whole[:, :, shares[me].q0 : shares[me].q1] = sends[me]
        pending.wait()
        for peer, share in enumerate(shares):
            if peer != me:
                whole[:, :, share.q0 : share.q1] = recvs[peer]
        return whole.permute(1, 2, 0, 3)

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


def _per_query_head(k: Tensor, v: Tensor, share: _Share, group: int) -> tuple[Tensor, Tensor]:
    """Repeats key/value heads where a run of query heads cuts through a group, so that all groups are whole."""
    if _is_aligned(share, group):
        return k, v
    index = torch.arange(share.q0, share.q1, device=k.device) // group - share.k0
    return k[:, index], v[:, index]
