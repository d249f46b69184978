"""Passes queries around the ranks and sends partial results straight back; keys and values stay (arXiv 2412.20501)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from partsong.kernels import merge
from partsong.knobs import Count
from partsong.parallel.attention_call import AttentionCall, AttentionShape, Inner, Stage, mask_rows, masked_attention
from partsong.parallel.exchange.wired import Wired
from partsong.parallel.exchange.wires import Wire, WireName, as_bytes, bytes_sent, wire_of
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import Pending, exchange
from partsong.parallel.ranks.mesh import Axis, Mesh

__all__ = ["TokenRing", "TokenRingStage"]

Partial = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRing(Wired):
    """Splits tokens over ranks; queries go around them, and partial results come straight back. Exact.

    Keys and values never move. While a rank computes on one block of queries, the next block arrives and the last
    partial result travels back, so both directions of the links carry data. Takes any number of heads; masks of
    keys stay with their keys. `Ring` sends fewer bytes in all, and far fewer where query heads share a key/value head.
    Otherwise TokenRing sends half as much in each direction.

    Use it when all ranks are linked to each other in both directions and each query head has its own key head.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        wire: ``fp8`` and ``int8`` round queries and partial outputs, with a scale for each token and head
            (docs/wires.md), which is approximate. Log-sum-exps travel as they are.

    Source: TokenRing, arXiv 2412.20501.
    """

    axes: ClassVar[tuple[str, ...]] = ("ring",)
    uneven_axes: ClassVar[tuple[str, ...]] = ("ring",)
    travels: ClassVar[str] = "queries and partial outputs"

    degree: Count | None = None
    wire: WireName = "none"

    def stages(self, mesh: Mesh, clock: StepClock) -> list[TokenRingStage]:
        """Returns the attention stages this strategy adds to a plan."""
        return [TokenRingStage(mesh.axis("ring"), wire_of(self.wire))]


class TokenRingStage(Stage):
    """Answers one block of queries after the other from the local keys and values."""

    def __init__(self, axis: Axis, wire: Wire | None = None) -> None:
        self.axis, self.wire = axis, wire

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Attends with the local queries to the keys of all ranks; `inner` is not needed."""
        # Queries lie in memory with tokens before heads, so sending them in that order copies nothing.
        block = call.q.transpose(1, 2).contiguous()
        queries = block if self.wire is None else self.wire.encode(block)
        mask = None if call.masks is None else call.masks[call.index]
        parts: list[Partial] = []
        letter: Tensor | None = None
        for turn in range(self.axis.size + 1):
            pending, incoming, returned = self._exchange(call, turn, queries, letter)
            if turn < self.axis.size:
                if call.whole_mask is not None:  # the mask of the current queries over this rank's keys
                    mask = mask_rows(call.whole_mask, call.sizes, (self.axis.index - turn) % self.axis.size)
                    mask = mask[self.axis.index]
                part = masked_attention(block.transpose(1, 2), call.k, call.v, mask, call.scale)
                letter = _pack(part, self.wire) if turn else None
                # A rank keeps its own part, which is the first, so the result has its memory layout.
                parts += [] if turn else [part]
            pending.wait()
            parts += [] if returned is None else [_unpack(returned, call.q, self.wire)]
            queries = incoming
            if turn < self.axis.size - 1:
                block = self._read(incoming, call, turn + 1)
        return merge(parts)[0]

    def _shape(self, call: AttentionCall, turn: int) -> tuple[int, ...]:
        """Returns the shape `[B, L, H, D]` of a turn's queries."""
        batch, heads, _, dim = call.q.shape
        return batch, call.sizes[(self.axis.index - turn) % self.axis.size], heads, dim

    def _read(self, queries: Tensor, call: AttentionCall, turn: int) -> Tensor:
        if self.wire is None:
            return queries
        return self.wire.decode(queries, self._shape(call, turn)).to(call.q.dtype)

    def _exchange(
        self, call: AttentionCall, turn: int, queries: Tensor, letter: Tensor | None
    ) -> tuple[Pending, Tensor, Tensor | None]:
        """Posts two messages together: a block of queries to pass on, and the last turn's result to its owner.

        In turn t a rank holds the queries of the rank t places before it; the rank t places further holds its own.
        """
        size, me = self.axis.size, self.axis.index
        sends: dict[int, Tensor] = {}
        recvs: dict[int, Tensor] = {}
        incoming, returned = queries, None
        if turn < size - 1:
            shape = self._shape(call, turn + 1)
            incoming = queries.new_empty(shape if self.wire is None else self.wire.size(shape))
            sends[(me + 1) % size], recvs[(me - 1) % size] = queries, incoming
        if letter is not None:
            returned = letter.new_empty(_letter_bytes(call.q.shape, call.q.element_size(), self.wire))
            sends[(me - turn + 1) % size], recvs[(me + turn - 1) % size] = letter, returned
        return exchange(self.axis, sends, recvs, name="token ring"), incoming, returned

    def predict(self, shape: AttentionShape) -> tuple[int, tuple[AttentionShape, ...]]:
        """Returns the bytes this rank sends: all queries but those that end here, and all results but its own."""
        size, dim = self.axis.size, shape.head_dim
        before = [shape.sizes[(shape.index - turn) % size] for turn in range(size)]
        rows = shape.batch * shape.heads
        queries = bytes_sent(self.wire, (sum(before[:-1]) * rows, dim), shape.itemsize)
        letters = (_letter_bytes((rows, tokens, dim), shape.itemsize, self.wire) for tokens in before[1:])
        return queries + sum(letters), (shape,)


def _lse_bytes(itemsize: int) -> int:
    """Returns the bytes of one log-sum-exp, which kernels give in float32, or in float64 for float64."""
    return max(itemsize, 4)


def _letter_bytes(shape: tuple[int, ...], itemsize: int, wire: Wire | None) -> int:
    """Returns the bytes of a partial result for queries `[B, H, L, D]`."""
    return math.prod(shape[:-1]) * _lse_bytes(itemsize) + bytes_sent(wire, shape, itemsize)


def _pack(part: Partial, wire: Wire | None) -> Tensor:
    """Packs a partial result into one message; the log-sum-exp comes first, which keeps both aligned."""
    out, lse = part
    body = out.transpose(1, 2).contiguous() if wire is None else wire.encode(out.transpose(1, 2))
    return torch.cat([as_bytes(lse), as_bytes(body)])


def _unpack(letter: Tensor, like: Tensor, wire: Wire | None) -> Partial:
    """Returns the output `[B, H, L, D]` and the log-sum-exp `[B, H, L]` in a message."""
    batch, heads, length, dim = like.shape
    width = _lse_bytes(like.element_size())
    lse, out = letter.split([batch * heads * length * width, len(letter) - batch * heads * length * width])
    lse = lse.view(torch.float64 if width == 8 else torch.float32).view(batch, heads, length)
    shape = (batch, length, heads, dim)
    out = out.view(like.dtype).view(shape) if wire is None else wire.decode(out, shape).to(like.dtype)
    return out.transpose(1, 2), lse
