"""Swaps tokens for heads, so that every rank attends over all tokens for a share of the heads (arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from partsong.knobs import Count
from partsong.parallel.attention_call import AttentionCall, AttentionShape, Inner, Stage, mask_rows, merged_runs
from partsong.parallel.exchange.head_dealer import WORK_BYTES, HeadDealer
from partsong.parallel.exchange.head_waves import Share, Wave, cut_waves, head_shares, in_waves
from partsong.parallel.exchange.wire_messages import exchange_by_wire
from partsong.parallel.exchange.wired import Wired
from partsong.parallel.exchange.wires import Wire, WireName, bytes_sent, wire_of
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import Pending, fused_all_to_all
from partsong.parallel.ranks.mesh import Axis, Mesh

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


class UlyssesStage(Stage):
    """Swaps tokens for heads, lets `inner` attend, and swaps back, one wave of heads after the other.

    Where blocks of keys are chosen and this rank then has all tokens, it chooses them for its heads. Heads differ in
    how many they see, so ranks get heads by what these were as work in the call before (db-SP, arXiv 2511.23113).
    """

    takes_blocks = True

    def __init__(self, axis: Axis, waves: int = 2, wire: Wire | None = None) -> None:
        self.axis, self.waves, self.wire = axis, waves, wire
        self.is_fused = wire is None and axis.is_fused
        self._waves: dict[tuple[Any, ...], list[Wave]] = {}
        self._shards: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._dealer = HeadDealer(axis)

    def abandon(self) -> None:
        """Drops what ranks know of each other's work, after an error."""
        self._dealer.abandon()

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Attends over all tokens of this axis' group, for this rank's heads."""
        return self._run(call, inner) if call.rule is None or not self._joins_all(call) else self._deal(call, inner)

    def _joins_all(self, call: AttentionCall | AttentionShape) -> bool:
        return len(call.sizes) == self.axis.size

    def _deal(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Runs a call in which blocks of keys are chosen, with heads distributed by their work."""
        rule, heads = call.rule, call.q.shape[1]
        assert rule is not None
        work, places = list[Tensor](), None
        if is_dealt := call.k.shape[1] == heads:  # groups of heads that share keys stay where they are
            order = self._dealer.order(call.layer, heads)
            if order != list(range(heads)):
                places = self._dealer.places(call.layer, call.q.device)
                q, k, v = (x.index_select(1, places[0]) for x in (call.q, call.k, call.v))
                call = replace(call, q=q, k=k, v=v)

        def attend(part: AttentionCall) -> Tensor:
            chosen = rule.choose(rule.means(part.q), rule.means(part.k))
            work.append(chosen.sum((0, 2, 3), dtype=torch.int32))
            return inner(replace(part, chosen=chosen))

        out = self._run(call, attend)
        if is_dealt:
            self._dealer.send(call.layer, torch.cat(work))
        return out if places is None else out.index_select(1, places[1])

    def _run(self, call: AttentionCall, inner: Inner) -> Tensor:
        (batch, heads, length, dim), size = call.q.shape, self.axis.size
        group = heads // call.k.shape[1]
        whole = call.q.new_empty((length, batch, heads, dim))
        waves = self._cut(call)
        key = call.sizes, call.runs, call.index
        if key not in self._shards:
            self._shards[key] = self._outer(call)
        outer = {**self._shards[key]}
        if call.masks is not None:
            starts = range(0, len(call.masks), size)
            outer["masks"] = tuple(torch.cat(call.masks[start : start + size], dim=-1) for start in starts)
        if call.whole_mask is not None:  # the queries of all ranks of this axis
            outer["masks"] = mask_rows(call.whole_mask, outer["sizes"], outer["index"])
        arriving = [self._scatter(call, wave) for wave in waves]
        leaving = []
        for number, (wave, (arrived, pending)) in enumerate(zip(waves, arriving, strict=True)):
            pending.wait()
            q, k, v = _unpack(arrived, wave.mine, group)
            out = q  # no heads in this wave, but the others' outputs still come back
            if wave.mine.rows or number == 0:  # inner stages may involve all ranks: every rank calls them at least once
                out = inner(replace(call, q=q, k=k, v=v, wave=call.wave * self.waves + number, **outer))
            leaving.append(self._collect(out, wave, call, whole))
        for finish in leaving:
            finish()
        return whole.permute(1, 2, 0, 3)

    def _cut(self, call: AttentionCall) -> list[Wave]:
        """Cuts the heads into waves, and remembers how."""
        on_device = call.q.is_cuda or (self.axis.dry and self.axis.is_fused)
        key = call.q.shape, call.k.shape[1], call.sizes, call.index, on_device
        if key not in self._waves:
            tokens, waves = self._token_counts(call), self.waves
            if on_device:
                tiles = call.q.shape[0] * -(-call.q.shape[1] // self.axis.size) * -(-sum(tokens) // TILE_ROWS)
                waves = min(waves, max(tiles // TILES, 1))
            q, kv_heads = tuple(call.q.shape), call.k.shape[1]
            self._waves[key] = cut_waves(self.axis, q, kv_heads, tokens, waves, keeps_own=not self.is_fused)
        return self._waves[key]

    def _token_counts(self, call: AttentionCall | AttentionShape) -> tuple[int, ...]:
        first = call.index - call.index % self.axis.size
        return call.sizes[first : first + self.axis.size]

    def _outer(self, call: AttentionCall | AttentionShape) -> dict[str, Any]:
        """Describes the shards that are still separate once this axis' ranks have joined theirs."""
        size = self.axis.size
        sizes = tuple(sum(call.sizes[start : start + size]) for start in range(0, len(call.sizes), size))
        return {"sizes": sizes, "runs": merged_runs(call.runs, size), "index": call.index // size}

    def _scatter(self, call: AttentionCall, wave: Wave) -> tuple[Tensor, Pending]:
        # Tokens are the first dimension, so what peers send arrives in place and needs no copy.
        batch, _, _, dim = call.q.shape
        heads = (call.q, call.k, call.v)
        arrived, packed = call.q.new_empty(sum(wave.received)), call.q.new_empty(sum(wave.sent))
        for copy in wave.there:
            copy.part(packed).copy_(copy.heads(heads[copy.source]))
        pending = self._swap(packed, wave.sent, arrived, wave.received, dim, "Ulysses: tokens to heads")
        for copy in wave.own:  # while the others' are in transit
            copy.part(arrived).copy_(copy.heads(heads[copy.source]))
        return arrived.view(sum(self._token_counts(call)), batch, wave.mine.rows, dim), pending

    def _swap(
        self, send: Tensor, sent: Sequence[int], recv: Tensor, received: Sequence[int], dim: int, name: str
    ) -> Pending:
        if self.is_fused:
            return fused_all_to_all(self.axis, send, sent, recv, received, name=name)
        outgoing, incoming = (
            {peer: part.view(-1, dim) for peer, part in enumerate(parts) if peer != self.axis.index}
            for parts in (send.split(list(sent)), recv.split(list(received)))
        )
        return exchange_by_wire(self.axis, outgoing, incoming, self.wire, name=name)

    def _collect(self, out: Tensor, wave: Wave, call: AttentionCall, whole: Tensor) -> Callable[[], None]:
        me, dim = self.axis.index, whole.shape[3]
        packed, arrived = out.permute(2, 0, 1, 3).contiguous(), out.new_empty(sum(wave.returned))
        name = "Ulysses: heads to tokens"
        pending = self._swap(packed.view(-1), wave.answered, arrived, wave.returned, dim, name)
        if not self.is_fused:
            own = packed.split(list(self._token_counts(call)))[me]
            whole[:, :, wave.mine.q0 : wave.mine.q1] = own

        def finish() -> None:
            pending.wait()
            heads = whole.permute(1, 2, 0, 3)
            for copy in wave.back:
                copy.heads(heads).copy_(copy.part(arrived))

        return finish

    def predict(self, shape: AttentionShape) -> tuple[int, tuple[AttentionShape, ...]]:
        """Returns the bytes this rank sends: q, k, v of the others' heads, then outputs of the others' tokens."""
        me, tokens = shape.index % self.axis.size, self._token_counts(shape)
        shares = head_shares(shape.heads, shape.kv_heads, self.axis)
        mine = shares[me]
        there = sum(share.rows for peer, share in enumerate(shares) if peer != me) * tokens[me]
        back = mine.queries * (sum(tokens) - tokens[me])
        sent = bytes_sent(self.wire, ((there + back) * shape.batch, shape.head_dim), shape.itemsize)
        if shape.block and self._joins_all(shape) and shape.heads == shape.kv_heads:
            sent += mine.queries * WORK_BYTES * (self.axis.size - 1)
        outer, group = self._outer(shape), shape.heads // shape.kv_heads
        return sent, tuple(
            replace(shape, heads=part.queries, kv_heads=part.keys if part.is_aligned(group) else part.queries, **outer)
            for wave, part in enumerate(in_waves(mine, group, self.waves))
            if part.rows or wave == 0
        )


def _unpack(arrived: Tensor, share: Share, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Takes queries, keys and values out of the rows that arrived.

    Where a run of query heads cuts through a group, key/value heads are repeated, so that all groups are whole.
    """
    counts = [share.queries, share.keys, share.keys]
    q, k, v = (part.permute(1, 2, 0, 3) for part in arrived.split(counts, dim=2))
    if share.is_aligned(group):
        return q, k, v
    index = torch.arange(share.q0, share.q1, device=k.device) // group - share.k0
    return q, k[:, index], v[:, index]
