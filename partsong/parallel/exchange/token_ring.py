"""Passes queries around the ranks and sends partial results straight back; keys and values stay (arXiv 2412.20501)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from partsong.kernels.merge import merge_checked
from partsong.knobs import Count
from partsong.parallel.attention_call import AttentionCall, AttentionShape, Inner, Stage, mask_rows, masked_attention
from partsong.parallel.exchange.rooms import Rooms
from partsong.parallel.exchange.turns import Blocks, Turn, doubles, refuse_doubling, turns_of
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

    As in `Ring`, messages between GPUs carry several blocks where these are short.

    Use it when all ranks are linked to each other in both directions and each query head has its own key head.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        wire: ``fp8`` and ``int8`` round queries and partial outputs, with a scale for each token and head
            (docs/wires.md), which is approximate. Log-sum-exps travel as they are.
        blocks: queries that a message carries: ``one`` block, ``doubling`` numbers of them, or ``auto``, as in `Ring`.

    Source: TokenRing, arXiv 2412.20501.
    """

    axes: ClassVar[tuple[str, ...]] = ("ring",)
    uneven_axes: ClassVar[tuple[str, ...]] = ("ring",)
    travels: ClassVar[str] = "queries and partial outputs"

    degree: Count | None = None
    wire: WireName = "none"
    blocks: Blocks = "auto"

    def validate(self) -> None:
        """Refuses doubled messages of compressed blocks."""
        super(TokenRing, self).validate()
        refuse_doubling(self, self.blocks)

    def stages(self, mesh: Mesh, clock: StepClock) -> list[TokenRingStage]:
        """Returns the attention stages this strategy adds to a plan."""
        return [TokenRingStage(mesh.axis("ring"), clock, wire_of(self.wire), self.blocks)]


@dataclass(frozen=True, slots=True)
class _Letters:
    """Holds the memory of messages that carry partial results of as many queries each, one message after the other.

    In each the log-sum-exps come first, which aligns both.

    Attributes:
        messages: the bytes of each.
        lse: a view of all log-sum-exps `[B, H, N, L]`, or `[B, H, L]` of a single one.
        out: a view of all outputs `[B, H, N, L, D]` or `[B, H, L, D]`; bytes of a single one that a wire writes.
        shape: `[B, L, H, D]` of an output.
    """

    messages: tuple[Tensor, ...]
    lse: Tensor
    out: Tensor
    shape: tuple[int, ...]

    @classmethod
    def within(cls, memory: Tensor, number: int, shape: tuple[int, ...], like: Tensor, wire: Wire | None) -> _Letters:
        """Lays out messages for outputs `[B, L, H, D]` at the beginning of a piece of memory."""
        batch, length, heads, dim = shape
        width, itemsize = _lse_bytes(like.element_size()), like.element_size()
        size, first = _letter_bytes(shape, itemsize, wire), batch * heads * length * width
        messages = memory[: number * size].split(size) if size else (memory[:0],) * number
        lse = memory[: (number - 1) * size + first].view(torch.float64 if width == 8 else torch.float32)
        lse = lse.as_strided((batch, heads, number, length), (heads * length, length, size // width, 1))
        out = memory[first : number * size]
        if wire is None:
            out = out.view(like.dtype)
            steps = (length * heads * dim, dim, size // itemsize, heads * dim, 1)
            out = out.as_strided((batch, heads, number, length, dim), steps, out.storage_offset())
            out = out[:, :, 0] if number == 1 else out
        return cls(messages, lse[:, :, 0] if number == 1 else lse, out, shape)

    @property
    def tokens(self) -> int:
        """Counts the queries that all messages answer."""
        return len(self.messages) * self.shape[1]

    def write(self, out: Tensor, lse: Tensor, wire: Wire | None) -> None:
        """Writes the results of the queries of all messages: outputs `[B, H, L, D]` and log-sum-exps `[B, H, L]`."""
        if len(self.messages) > 1:
            each = len(self.messages), self.shape[1]
            out, lse = out.unflatten(2, each), lse.unflatten(2, each)
        self.lse.copy_(lse)
        self.out.copy_(out if wire is None else wire.encode(out.transpose(1, 2)))

    def read(self, dtype: torch.dtype, wire: Wire | None) -> Partial:
        """Returns the output `[B, H, L, D]` and its log-sum-exp from the only message."""
        if wire is None:
            return self.out, self.lse
        return wire.decode(self.out, self.shape).to(dtype).transpose(1, 2), self.lse


@dataclass(frozen=True, slots=True)
class _Room:
    """Holds the memory of an attention, and its messages.

    Attributes:
        groups: the blocks that are answered together after each exchange but the last; the first one is this rank's.
        queries: the message `[L, B, H, D]` with the queries of each group, or its bytes where a wire writes it.
        written: what this rank answers to the others, for each group; blocks of one length lie in one piece of memory.
        returned: what the others answer to this rank.
        posts: the exchanges.
    """

    groups: tuple[range, ...]
    queries: tuple[Tensor, ...]
    written: tuple[tuple[_Letters, ...], ...]
    returned: tuple[_Letters, ...]
    posts: tuple[Messages, ...]


class TokenRingStage(Stage):
    """Answers one group of queries after the other from the local keys and values.

    All layers of a generation share the memory of an attention, whose messages are prepared once.
    """

    def __init__(self, axis: Axis, clock: StepClock, wire: Wire | None = None, blocks: Blocks = "auto") -> None:
        self.axis, self.wire = axis, wire
        self.knob: Blocks = blocks if wire is None else "one"
        self._rooms: Rooms[_Room] = Rooms(clock)

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Attends with the local queries to the keys of all ranks; `inner` is not needed."""
        room = self._rooms.of(call.q, call.sizes, make=lambda: self._make_room(call))
        rows = call.q.permute(2, 0, 1, 3)
        room.queries[0].copy_(rows if self.wire is None else self.wire.encode(rows))
        # A rank keeps its own part, which is the first, so the result has its memory layout.
        own: list[Partial] = []
        for turn, messages in enumerate(room.posts):
            pending = messages.post()
            if not own:
                own.append(masked_attention(call.q, call.k, call.v, self._mask(call, room.groups[0]), call.scale))
            elif turn < len(room.groups):
                self._answer(room, call, turn)
            pending.wait()
        return merge_checked(own + [letter.read(call.q.dtype, self.wire) for letter in room.returned])[0]

    def _answer(self, room: _Room, call: AttentionCall, turn: int) -> None:
        """Answers the queries of a turn, in one message for each block."""
        blocks, rows = room.groups[turn], room.queries[turn]
        if self.wire is not None:
            rows = self.wire.decode(rows, self._shape(call, blocks)).to(call.q.dtype)
        mask = self._mask(call, blocks)
        out, lse = masked_attention(rows.permute(1, 2, 0, 3), call.k, call.v, mask, call.scale)
        lots, start = room.written[turn], 0
        if len(lots) == 1:
            lots[0].write(out, lse, self.wire)
            return
        for letters in lots:
            letters.write(out.narrow(2, start, letters.tokens), lse.narrow(2, start, letters.tokens), self.wire)
            start += letters.tokens

    def _mask(self, call: AttentionCall, blocks: range) -> Tensor | None:
        """Returns the mask of the queries of some blocks over this rank's keys."""
        if call.whole_mask is None:
            return None if call.masks is None else call.masks[call.index]
        size, me = self.axis.size, self.axis.index
        rows = [mask_rows(call.whole_mask, call.sizes, (me - block) % size)[me] for block in blocks]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=2)

    def _shape(self, call: AttentionCall, blocks: range) -> tuple[int, ...]:
        """Returns the shape `[L, B, H, D]` of the queries of some blocks."""
        batch, heads, _, dim = call.q.shape
        tokens = sum(call.sizes[(self.axis.index - block) % self.axis.size] for block in blocks)
        return tokens, batch, heads, dim

    def _turns(self, sizes: Sequence[int], heads: int) -> tuple[Turn, ...]:
        return turns_of(self.axis.size, doubling=doubles(self.knob, self.axis, sizes, heads))

    def _make_room(self, call: AttentionCall) -> _Room:
        """Allocates what an attention needs."""
        size, wire, like, (batch, heads, _, dim) = self.axis.size, self.wire, call.q, call.q.shape
        turns = self._turns(call.sizes, batch * heads)
        groups = (range(1), *(turn.arriving for turn in turns))
        queries = self._queries(call, turns, groups)
        shapes = [(batch, self._shape(call, range(block, block + 1))[0], heads, dim) for block in range(size)]
        sizes = [_letter_bytes(shape, like.element_size(), wire) for shape in shapes]

        def room(number: int) -> Tensor:
            return torch.empty(number, dtype=torch.uint8, device=like.device)

        # Of single blocks one answer is sent while the next one is written.
        pieces = [room(max(sizes)) for _ in range(2)] if len(turns) == size - 1 else None
        written: list[tuple[_Letters, ...]] = [()]  # a rank does not write to itself
        for turn, group in enumerate(groups[1:]):
            lots = _alike(group, sizes)
            memory = (room(sizes[first] * number) if pieces is None else pieces[turn % 2] for first, number in lots)
            written.append(
                tuple(
                    _Letters.within(place, number, shapes[first], like, wire)
                    for place, (first, number) in zip(memory, lots, strict=True)
                )
            )
        returned = tuple(_Letters.within(room(sizes[0]), 1, shapes[0], like, wire) for _ in range(1, size))
        return _Room(groups, queries, tuple(written), returned, self._posts(turns, groups, queries, written, returned))

    def _queries(self, call: AttentionCall, turns: Sequence[Turn], groups: Sequence[range]) -> tuple[Tensor, ...]:
        """Lays out the messages with queries: single blocks in two pieces of memory beside the own, else end to end."""
        shapes, like = [self._shape(call, blocks) for blocks in groups], call.q
        if any(turn.count > 1 for turn in turns):
            whole = like.new_empty((sum(call.sizes), *shapes[0][1:]))
            return whole.split([shape[0] for shape in shapes])
        sizes = [bytes_sent(self.wire, shape, like.element_size()) for shape in shapes]
        own, *others = (torch.empty(max(sizes), dtype=torch.uint8, device=like.device) for _ in range(3))
        bytes_of = [(others[turn % 2] if turn else own)[:size] for turn, size in enumerate(sizes)]
        if self.wire is not None:
            return tuple(bytes_of)
        return tuple(each.view(like.dtype).view(shape) for each, shape in zip(bytes_of, shapes, strict=True))

    def _posts(
        self,
        turns: Sequence[Turn],
        groups: Sequence[range],
        queries: Sequence[Tensor],
        written: Sequence[Sequence[_Letters]],
        returned: Sequence[_Letters],
    ) -> tuple[Messages, ...]:
        """Prepares exchanges: queries to pass on, and the last answers to those who asked.

        Block j is answered to the rank j places before, and the rank j places further answers this rank's.
        """
        size, me = self.axis.size, self.axis.index
        sends, recvs = ([dict[int, Tensor]() for _ in range(len(groups) + 1)] for _ in range(2))
        for place, turn in enumerate(turns):
            sends[place][(me + turn.hop) % size] = _joined(queries, groups, turn.sent)
            recvs[place][(me - turn.hop) % size] = queries[place + 1]
        for place, group in enumerate(groups[1:], start=2):
            answers = (message for letters in written[place - 1] for message in letters.messages)
            for block, answer in zip(group, answers, strict=True):
                to, by = (me - block) % size, (me + block) % size
                # A rank that is sent queries already gets the answer in the last exchange.
                chosen = place if to not in sends[place] and by not in recvs[place] else len(groups)
                sends[chosen][to], recvs[chosen][by] = answer, returned[block - 1].messages[0]
        return tuple(Messages(self.axis, *both, name="token ring") for both in zip(sends, recvs, strict=True))

    def predict(self, shape: AttentionShape) -> tuple[int, tuple[AttentionShape, ...]]:
        """Returns the bytes this rank sends: all queries but those that end here, and all results but its own."""
        size, dim = self.axis.size, shape.head_dim
        before = [shape.sizes[(shape.index - turn) % size] for turn in range(size)]
        rows = shape.batch * shape.heads
        passed = sum(before[block] for turn in self._turns(shape.sizes, rows) for block in turn.sent)
        queries = bytes_sent(self.wire, (passed * rows, dim), shape.itemsize)
        letters = (_letter_bytes((rows, tokens, dim), shape.itemsize, self.wire) for tokens in before[1:])
        return queries + sum(letters), (shape,)


def _lse_bytes(itemsize: int) -> int:
    """Returns the bytes of one log-sum-exp, which kernels give in float32, or in float64 for float64."""
    return max(itemsize, 4)


def _letter_bytes(shape: tuple[int, ...], itemsize: int, wire: Wire | None) -> int:
    """Returns the bytes of a partial result for queries `[B, H, L, D]`."""
    return math.prod(shape[:-1]) * _lse_bytes(itemsize) + bytes_sent(wire, shape, itemsize)


def _joined(queries: Sequence[Tensor], groups: Sequence[range], blocks: range) -> Tensor:
    """Returns the queries of some blocks, which are one group or the first groups in one piece of memory."""
    last = next(place for place, group in enumerate(groups) if group[-1] == blocks[-1])
    if groups[last] == blocks:
        return queries[last]
    tokens = sum(part.shape[0] for part in queries[: last + 1])
    return queries[0].as_strided((tokens, *queries[0].shape[1:]), queries[0].stride())


def _alike(blocks: range, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the first and the number of neighbouring blocks whose answers are equally long and can lie end to end."""
    lots: list[tuple[int, int]] = []
    for block in blocks:
        first, number = lots[-1] if lots else (block, 0)
        # After any other number of bytes a log-sum-exp would not be aligned.
        if number and sizes[block] == sizes[first] and sizes[block] % 8 == 0:
            lots[-1] = first, number + 1
        else:
            lots.append((block, 1))
    return lots
