"""Passes queries around the ranks and sends partial results straight back; keys and values stay (arXiv 2412.20501)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from partsong.kernels import merge
from partsong.knobs import Count
from partsong.parallel.attention_call import AttentionCall, AttentionShape, Inner, Stage, mask_rows, masked_attention
from partsong.parallel.exchange.rooms import Rooms
from partsong.parallel.exchange.wired import Wired
from partsong.parallel.exchange.wires import Wire, WireName, bytes_sent, wire_of
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import Messages
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
        return [TokenRingStage(mesh.axis("ring"), clock, wire_of(self.wire))]


@dataclass(frozen=True, slots=True)
class _Letter:
    """Holds the memory of a message that carries a partial result; the log-sum-exp comes first, which aligns both.

    Attributes:
        message: all of its bytes.
        lse: a view of the log-sum-exp `[B, H, L]`.
        body: a view of the output `[B, L, H, D]`, or of its bytes where a wire writes it.
        shape: of the output.
    """

    message: Tensor
    lse: Tensor
    body: Tensor
    shape: tuple[int, ...]

    @classmethod
    def within(cls, memory: Tensor, shape: tuple[int, ...], like: Tensor, wire: Wire | None) -> _Letter:
        """Lays out a message for an output `[B, L, H, D]` at the beginning of a piece of memory."""
        batch, length, heads, dim = shape
        width = _lse_bytes(like.element_size())
        message = memory[: _letter_bytes((batch, heads, length, dim), like.element_size(), wire)]
        size = batch * heads * length * width
        lse = message[:size].view(torch.float64 if width == 8 else torch.float32).view(batch, heads, length)
        body = message[size:]
        return cls(message, lse, body if wire is not None else body.view(like.dtype).view(shape), shape)

    def write(self, part: Partial, wire: Wire | None) -> None:
        """Writes a partial result."""
        out = part[0].transpose(1, 2)
        self.lse.copy_(part[1])
        self.body.copy_(out if wire is None else wire.encode(out))

    def read(self, dtype: torch.dtype, wire: Wire | None) -> Partial:
        """Returns the output `[B, H, L, D]` and its log-sum-exp."""
        out = self.body if wire is None else wire.decode(self.body, self.shape).to(dtype)
        return out.transpose(1, 2), self.lse


@dataclass(frozen=True, slots=True)
class _Room:
    """Holds the memory of an attention, and its messages.

    Attributes:
        queries: the message with the queries of each turn; the first one is this rank's.
        written: what this rank answers to the others, from the second turn on.
        returned: what the others answer to this rank.
        turns: the messages of each turn.
    """

    queries: tuple[Tensor, ...]
    written: tuple[_Letter, ...]
    returned: tuple[_Letter, ...]
    turns: tuple[Messages, ...]


class TokenRingStage(Stage):
    """Answers one block of queries after the other from the local keys and values.

    All layers of a generation share the memory of an attention, whose messages are prepared once.
    """

    def __init__(self, axis: Axis, clock: StepClock, wire: Wire | None = None) -> None:
        self.axis, self.wire = axis, wire
        self._rooms: Rooms[_Room] = Rooms(clock)

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Attends with the local queries to the keys of all ranks; `inner` is not needed."""
        room = self._rooms.of(call.q, call.sizes, make=lambda: self._make_room(call))
        # Queries lie in memory with tokens before heads, and so do all messages.
        rows = call.q.transpose(1, 2)
        room.queries[0].copy_(rows if self.wire is None else self.wire.encode(rows))
        mask = None if call.masks is None else call.masks[call.index]
        own: list[Partial] = []
        for turn, messages in enumerate(room.turns):
            pending = messages.post()
            if turn < self.axis.size:
                if call.whole_mask is not None:  # the mask of the current queries over this rank's keys
                    mask = mask_rows(call.whole_mask, call.sizes, (self.axis.index - turn) % self.axis.size)
                    mask = mask[self.axis.index]
                q = self._read(room, call, turn) if turn else call.q
                part = masked_attention(q, call.k, call.v, mask, call.scale)
                if turn:
                    room.written[turn - 1].write(part, self.wire)
                else:  # a rank keeps its own part, which is the first, so the result has its memory layout
                    own = [part]
            pending.wait()
        return merge(own + [letter.read(call.q.dtype, self.wire) for letter in room.returned])[0]

    def _read(self, room: _Room, call: AttentionCall, turn: int) -> Tensor:
        """Returns the queries `[B, H, L, D]` of a turn."""
        rows = room.queries[turn]
        if self.wire is not None:
            rows = self.wire.decode(rows, self._shape(call, turn)).to(call.q.dtype)
        return rows.transpose(1, 2)

    def _shape(self, call: AttentionCall, turn: int) -> tuple[int, ...]:
        """Returns the shape `[B, L, H, D]` of a turn's queries."""
        batch, heads, _, dim = call.q.shape
        return batch, call.sizes[(self.axis.index - turn) % self.axis.size], heads, dim

    def _make_room(self, call: AttentionCall) -> _Room:
        """Allocates what an attention needs; two pieces of memory take turns where one is sent and one filled."""
        size, wire, like = self.axis.size, self.wire, call.q
        shapes = [self._shape(call, turn) for turn in range(size)]
        largest = max(shapes, key=math.prod)
        queries = self._alternating([bytes_sent(wire, shape, like.element_size()) for shape in shapes], like)
        if wire is None:
            queries = [each.view(like.dtype).view(shape) for each, shape in zip(queries, shapes, strict=True)]
        most = _letter_bytes(largest, like.element_size(), wire)
        pieces = [torch.empty(most, dtype=torch.uint8, device=like.device) for _ in range(2)]
        written = [_Letter.within(pieces[turn % 2], shapes[turn], like, wire) for turn in range(1, size)]
        own = _letter_bytes(shapes[0], like.element_size(), wire)
        fresh = (torch.empty(own, dtype=torch.uint8, device=like.device) for _ in range(1, size))
        returned = [_Letter.within(memory, shapes[0], like, wire) for memory in fresh]
        turns = [self._messages(turn, queries, written, returned) for turn in range(size + 1)]
        return _Room(tuple(queries), tuple(written), tuple(returned), tuple(turns))

    def _alternating(self, sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        """Lays out a message for each turn, the first one apart."""
        own, *others = (torch.empty(max(sizes), dtype=torch.uint8, device=like.device) for _ in range(3))
        return [(others[turn % 2] if turn else own)[:size] for turn, size in enumerate(sizes)]

    def _messages(
        self, turn: int, queries: Sequence[Tensor], written: Sequence[_Letter], returned: Sequence[_Letter]
    ) -> Messages:
        """Prepares two messages that go together: a block of queries to pass on, and the last result to its owner.

        In turn t a rank holds the queries of the rank t places before it; the rank t places further holds its own.
        """
        size, me = self.axis.size, self.axis.index
        sends: dict[int, Tensor] = {}
        recvs: dict[int, Tensor] = {}
        if turn < size - 1:
            sends[(me + 1) % size], recvs[(me - 1) % size] = queries[turn], queries[turn + 1]
        if turn > 1:
            sends[(me - turn + 1) % size] = written[turn - 2].message
            recvs[(me + turn - 1) % size] = returned[turn - 2].message
        return Messages(self.axis, sends, recvs, name="token ring")

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
