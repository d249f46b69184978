"""Passes queries around the ranks and sends partial results straight back; keys and values stay (arXiv 2412.20501)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from partsong.kernels import merge
from partsong.knobs import Count
from partsong.parallel.attention_call import AttentionCall, AttentionShape, Inner, Stage, masked_attention, own_rows
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import Pending, exchange
from partsong.parallel.ranks.mesh import Axis, Mesh
from partsong.parallel.strategy import Strategy

__all__ = ["TokenRing", "TokenRingStage"]

Partial = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRing(Strategy):
    """Splits tokens over ranks; queries go around them, and partial results come straight back. Exact.

    Keys and values never move. While a rank computes on one block of queries, the next block is on its way in and the
    last partial result on its way back, so both directions of the links carry data. Takes any number of heads; masks of
    keys stay with their keys. `Ring` sends fewer bytes in all, and far fewer where query heads share a key/value head.
    Where they do not, this one sends half as much in each direction.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.

    Source: TokenRing, arXiv 2412.20501.
    """

    axes: ClassVar[tuple[str, ...]] = ("ring",)

    degree: Count | None = None

    def stages(self, mesh: Mesh, clock: StepClock) -> list[TokenRingStage]:
        """Returns the attention stages this strategy adds to a plan."""
        return [TokenRingStage(mesh.axis("ring"))]


class TokenRingStage(Stage):
    """Answers one block of queries after the other from the keys and values at hand."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Attends with the local queries to the keys of all ranks; `inner` is not needed."""
        # Queries lie in memory with tokens before heads, so sending them in that order copies nothing.
        block = call.q.transpose(1, 2).contiguous()
        parts: list[Partial] = []
        letter: Tensor | None = None
        for turn in range(self.axis.size + 1):
            pending, incoming, returned = self._exchange(call, turn, block, letter)
            if turn < self.axis.size:
                masks = own_rows(call, (call.index - turn) % self.axis.size)
                mask = None if masks is None else masks[call.index]
                part = masked_attention(block.transpose(1, 2), call.k, call.v, mask, call.scale)
                letter = _pack(part) if turn else None
                # A rank keeps its own part. It is the first, so the result has its memory layout.
                parts += [] if turn else [part]
            pending.wait()
            parts += [] if returned is None else [_unpack(returned, call.q)]
            block = incoming
        return merge(parts)[0]

    def _exchange(
        self, call: AttentionCall, turn: int, block: Tensor, letter: Tensor | None
    ) -> tuple[Pending, Tensor, Tensor | None]:
        """Posts two messages together: a block of queries to pass on, and the last turn's result to its owner.

        In turn t a rank holds the queries of the rank t places before it; the rank t places further holds its own.
        """
        size, me = self.axis.size, self.axis.index
        sends: dict[int, Tensor] = {}
        recvs: dict[int, Tensor] = {}
        incoming, returned = block, None
        if turn < size - 1:
            incoming = block.new_empty((block.shape[0], call.sizes[(me - turn - 1) % size], *block.shape[2:]))
            sends[(me + 1) % size], recvs[(me - 1) % size] = block, incoming
        if letter is not None:
            returned = letter.new_empty(_letter_bytes(call.q.shape, call.q.element_size()))
            sends[(me - turn + 1) % size], recvs[(me + turn - 1) % size] = letter, returned
        return exchange(self.axis, sends, recvs, name="token ring"), incoming, returned

    def predict(self, shape: AttentionShape) -> tuple[int, AttentionShape]:
        """Returns the bytes this rank sends: all queries but those that end here, and all results but its own."""
        size, dim = self.axis.size, shape.head_dim
        before = [shape.sizes[(shape.index - turn) % size] for turn in range(size)]
        queries = sum(before[:-1]) * shape.batch * shape.heads * dim * shape.itemsize
        letters = (_letter_bytes((shape.batch, shape.heads, tokens, dim), shape.itemsize) for tokens in before[1:])
        return queries + sum(letters), shape


def _lse_bytes(itemsize: int) -> int:
    """Returns the bytes of one log-sum-exp, which kernels give in float32, or in float64 for float64."""
    return max(itemsize, 4)


def _letter_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Returns the bytes of a partial result for queries `[B, H, L, D]`."""
    *rows, dim = shape
    return math.prod(rows) * (_lse_bytes(itemsize) + dim * itemsize)


def _pack(part: Partial) -> Tensor:
    """Packs a partial result into one message; the log-sum-exp comes first, which keeps both aligned."""
    out = part[0]
    letter = torch.empty(_letter_bytes(out.shape, out.element_size()), dtype=torch.uint8, device=out.device)
    for target, source in zip(_unpack(letter, out), part, strict=True):
        target.copy_(source)
    return letter


def _unpack(letter: Tensor, like: Tensor) -> Partial:
    """Returns views `[B, H, L, D]` and `[B, H, L]` of the output and the log-sum-exp in a message."""
    batch, heads, length, dim = like.shape
    width = _lse_bytes(like.element_size())
    lse, out = letter.split([batch * heads * length * width, batch * heads * length * dim * like.element_size()])
    out = out.view(like.dtype).view(batch, length, heads, dim).transpose(1, 2)
    return out, lse.view(torch.float64 if width == 8 else torch.float32).view(batch, heads, length)
