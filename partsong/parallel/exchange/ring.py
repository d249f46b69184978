"""Passes key/value blocks around the ranks while each computes on the one it has (arXiv 2310.01889)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.kernels import ChosenBlocks, attention
from partsong.kernels.attend import attend_block
from partsong.knobs import Count
from partsong.parallel.attention_call import AttentionCall, AttentionShape, Inner, Stage
from partsong.parallel.exchange.key_blocks import empty_block, unpack_keys_values, write_keys_values
from partsong.parallel.exchange.known_rows import KnownRows, Stretch
from partsong.parallel.exchange.rooms import Rooms
from partsong.parallel.exchange.turns import Blocks, Turn, doubles, refuse_doubling, turns_of
from partsong.parallel.exchange.wired import Wired
from partsong.parallel.exchange.wires import Wire, WireName, wire_of
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import Messages, gather_tokens, ring_exchange
from partsong.parallel.ranks.mesh import Axis, Mesh
from partsong.parallel.ranks.shards import offsets

__all__ = ["WHOLE_STEPS", "Ring", "RingStage", "ring_stage"]


#: The ranks of blocks of keys and values `[B, H, L, D]` that lie end to end, and the two.
Block = tuple[tuple[int, ...], Tensor, Tensor]

#: First steps in which residual wires send blocks as they are: two, so that their base can be extrapolated.
WHOLE_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring(Wired):
    """Splits tokens over ranks and passes key/value blocks from rank to rank. Exact.

    The next block is in transit while the current one is computed, and each block's attention is merged into the result
    so far by its log-sum-exp. Takes any number of heads, also fewer than ranks, and memory for three blocks of keys.
    Where blocks are short, GPUs would wait for hosts that begin one turn after the other. There a message carries twice
    as many blocks as the one before it.

    Use it when sequences are long and links are those of PCI Express, or when there are more ranks than heads.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        wire: how blocks are written into messages (docs/wires.md). Any but ``none`` rounds them, which is approximate;
            residuals are relative to earlier steps, and cost memory for the keys and values of all layers.
        blocks: what a message carries: ``one`` block, from the next rank; or ``doubling`` numbers of them, in fewer
            turns, with memory for the blocks of all ranks. ``auto`` doubles between GPUs where blocks are short. Wires
            take one.

    Source: Ring Attention, arXiv 2310.01889; residual messages are those of CompactFusion, doubled ones Bruck's.

    Example:
        >>> Ring().kind, Ring(wire="int8").kind
        ('exact', 'approximate')
    """

    axes: ClassVar[tuple[str, ...]] = ("ring",)
    uneven_axes: ClassVar[tuple[str, ...]] = ("ring",)
    travels: ClassVar[str] = "keys and values"
    takes_residuals: ClassVar[bool] = True

    degree: Count | None = None
    wire: WireName = "none"
    blocks: Blocks = "auto"

    def validate(self) -> None:
        """Refuses doubled messages of compressed blocks."""
        super(Ring, self).validate()
        refuse_doubling(self, self.blocks)

    @property
    def warmup_steps(self) -> int:  # type: ignore[override]
        """Returns the first steps in which blocks travel as they are, since residuals have no base yet."""
        wire = wire_of(self.wire)
        return WHOLE_STEPS if wire is not None and wire.is_residual else 0

    def stages(self, mesh: Mesh, clock: StepClock) -> list[RingStage]:
        """Returns the attention stages this strategy adds to a plan."""
        return [ring_stage(mesh.axis("ring"), clock, self.wire, self.blocks)]


def ring_stage(axis: Axis, clock: StepClock, wire: WireName, blocks: Blocks = "auto") -> RingStage:
    """Returns the stage of a ring, for plain or compressed blocks."""
    chosen = wire_of(wire)
    return RingStage(axis, clock, blocks) if chosen is None else WiredRingStage(axis, clock, chosen)


@dataclass(frozen=True, slots=True)
class _Room:
    """Holds the memory of a ring.

    Attributes:
        k: where this rank's keys go before they are sent.
        v: where its values go.
        turns: each exchange, with the blocks that arrive in it.
    """

    k: Tensor
    v: Tensor
    turns: tuple[tuple[Messages, Block], ...]


class RingStage(Stage):
    """Attends to one key/value block after the other, as they come around.

    All layers of a generation share the memory for blocks, whose messages are prepared once.
    """

    takes_blocks = True

    def __init__(self, axis: Axis, clock: StepClock, blocks: Blocks = "auto") -> None:
        self.axis = axis
        self.knob: Blocks = blocks
        self._rooms: Rooms[_Room] = Rooms(clock)

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Attends with the local queries to the blocks of all ranks; `inner` is not needed."""
        total = None
        call = self._chosen(call)
        for owners, k, v in self.blocks(call):
            total = _attend(call, k, v, owners, total)
        assert total is not None
        return total[0].to(call.q.dtype)

    def blocks(self, call: AttentionCall) -> Iterator[Block]:
        """Yields the keys and values of every rank, this one's first, while the next are in transit."""
        room = self._rooms.of(call.k, call.sizes, make=lambda: self._make_room(call))
        room.k.copy_(call.k)
        room.v.copy_(call.v)
        block: Block = (self.axis.index,), call.k, call.v
        for messages, arriving in room.turns:
            pending = messages.post()
            yield block
            pending.wait()
            block = arriving
        yield block

    def _chosen(self, call: AttentionCall) -> AttentionCall:
        """Chooses the blocks of all keys that the queries here see, where blocks are chosen."""
        rule = call.rule
        if rule is None:
            return call
        if any(size % rule.size for size in call.sizes):
            raise UnsupportedError(f"ring attention: shards of {call.sizes} tokens are no blocks of {rule.size}")
        counts = _block_counts(call.sizes, rule.size)
        keys = gather_tokens(self.axis, rule.means(call.k), counts, 2, name="means of blocks of keys")
        return replace(call, chosen=rule.choose(rule.means(call.q), keys, offsets(counts)[call.index]))

    def _turns(self, sizes: Sequence[int], heads: int) -> tuple[Turn, ...]:
        return turns_of(self.axis.size, doubling=doubles(self.knob, self.axis, sizes, heads))

    def _make_room(self, call: AttentionCall) -> _Room:
        size, me = self.axis.size, self.axis.index
        turns = self._turns(call.sizes, call.q.shape[0] * call.q.shape[1])
        lengths = [call.sizes[(me - block) % size] for block in range(size)]
        if any(turn.count > 1 for turn in turns):
            starts = offsets(lengths)
            whole = empty_block(call.k, sum(lengths))
        else:  # two pieces of memory take turns, beside this rank's own
            starts = [(1 + block % 2) * max(lengths) if block else 0 for block in range(size)]
            whole = empty_block(call.k, 3 * max(lengths))

        def part(blocks: range) -> Tensor:
            return whole[starts[blocks[0]] :][: sum(lengths[block] for block in blocks)]

        prepared = []
        for turn in turns:
            arriving = part(turn.arriving)
            sends, recvs = {(me + turn.hop) % size: part(turn.sent)}, {(me - turn.hop) % size: arriving}
            owners = tuple((me - block) % size for block in turn.arriving)
            messages = Messages(self.axis, sends, recvs, name="ring attention")
            prepared.append((messages, (owners, *unpack_keys_values(arriving))))
        return _Room(*unpack_keys_values(part(range(1))), tuple(prepared))

    def predict(self, shape: AttentionShape) -> tuple[int, tuple[AttentionShape, ...]]:
        """Returns the bytes this rank sends: its own block, then every block it passes on."""
        size, unit = self.axis.size, shape.batch * 2 * shape.kv_heads * shape.head_dim * shape.itemsize
        turns = self._turns(shape.sizes, shape.batch * shape.heads)
        moved = sum(shape.sizes[(shape.index - block) % size] for turn in turns for block in turn.sent) * unit
        return moved + self._choosing(shape), (shape,)

    def _choosing(self, shape: AttentionShape) -> int:
        """Counts the bytes of the means that this rank sends, where blocks are chosen."""
        if not shape.block:
            return 0
        rows = shape.sizes[shape.index] // shape.block
        return rows * shape.batch * shape.kv_heads * shape.head_dim * shape.itemsize * (self.axis.size - 1)


class WiredRingStage(RingStage):
    """Attends to blocks that come around as compressed messages, which every rank passes on unchanged.

    So all ranks read the same values of a block, and with residuals, all know the same earlier values.

    Attributes:
        known: for each layer, wave and branch the decoded rows of all ranks, and the position of each rank's.
    """

    def __init__(self, axis: Axis, clock: StepClock, wire: Wire) -> None:
        super().__init__(axis, clock, "one")
        self.clock, self.wire = clock, wire
        self.known: dict[tuple[int, int, int], tuple[KnownRows, list[Stretch]]] = {}
        clock.on_begin(self.abandon)
        clock.on_end(self.abandon)
        clock.on_change(self.forget)

    def forget(self, branch: int) -> None:
        """Forgets what is known for one branch."""
        for key in [key for key in self.known if key[2] == branch]:
            del self.known[key]

    def abandon(self) -> None:
        """Forgets what is known; no message is pending."""
        self.known.clear()

    def blocks(self, call: AttentionCall) -> Iterator[Block]:
        """Yields this rank's keys and values as they are, and those of the others as decoded from messages."""
        key, step = (call.layer, call.wave, self.clock.branch), self.clock.step
        is_whole = self.wire.is_residual and (step < WHOLE_STEPS or key not in self.known)
        if key not in self.known:
            self.known[key] = self._room(call)
        known, stretches = self.known[key]
        own = empty_block(call.k, call.k.shape[2])
        write_keys_values(own, call.k, call.v)
        me, parts = self.axis.index, [(stretch, stretch.ratio(self.clock, step)) for stretch in stretches]
        message = own if is_whole else known.encode([own], [parts[me]])
        k, v = call.k, call.v
        for owner, before in self.turns():
            rows = stretches[before].length
            incoming = own.new_empty((rows, *own.shape[1:])) if is_whole else known.room(rows)
            pending = ring_exchange(self.axis, message, incoming, name="ring attention")
            if self.wire.is_residual and owner == me:
                self._take(known, message, parts[me], is_whole)
            yield (owner,), k, v
            pending.wait()
            message = incoming
            k, v = unpack_keys_values(self._take(known, message, parts[before], is_whole))
        yield ((me + 1) % self.axis.size,), k, v

    def turns(self) -> Iterator[tuple[int, int]]:
        """Yields, for every turn but the last, the owner of the current block and of the one that arrives."""
        size, me = self.axis.size, self.axis.index
        return (((me - turn) % size, (me - turn - 1) % size) for turn in range(size - 1))

    def _room(self, call: AttentionCall) -> tuple[KnownRows, list[Stretch]]:
        step = self.clock.step
        buffers = [empty_block(call.k, sum(call.sizes)) for _ in range(2 if self.wire.is_residual else 1)]
        places = zip(offsets(call.sizes), call.sizes, strict=True)
        stretches = [Stretch(slice(start, start + size), (step, step)) for start, size in places]
        return KnownRows(buffers[0], buffers[1] if len(buffers) > 1 else None, self.wire), stretches

    def _take(self, known: KnownRows, message: Tensor, part: tuple[Stretch, float], is_whole: bool) -> Tensor:
        """Decodes the block of one rank, and returns it."""
        if is_whole:
            known.put(part[0], message, self.clock.step)
        else:
            known.take(message, [part], self.clock.step)
        return known.last[part[0].rows]

    def predict(self, shape: AttentionShape) -> tuple[int, tuple[AttentionShape, ...]]:
        """Returns the bytes this rank sends: a message for its own block, then every message it passes on."""
        if self.wire.is_residual and shape.step < WHOLE_STEPS:
            return super().predict(shape)
        row, size = (shape.batch, 2, shape.kv_heads, shape.head_dim), self.axis.size
        blocks = (shape.sizes[(shape.index - turn) % size] for turn in range(size - 1))
        return sum(self.wire.size((rows, *row)) for rows in blocks) + self._choosing(shape), (shape,)


def _block_counts(sizes: Sequence[int], block: int) -> tuple[int, ...]:
    return tuple(size // block for size in sizes)


def _attend(
    call: AttentionCall, k: Tensor, v: Tensor, owners: tuple[int, ...], total: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Adds the blocks of some ranks to the result so far."""
    if call.rule is not None:
        assert call.chosen is not None
        by_owner = call.chosen.split(list(_block_counts(call.sizes, call.rule.size)), dim=3)
        seen = ChosenBlocks(torch.cat([by_owner[owner] for owner in owners], dim=3), call.rule.size)
        out, lse = attention(call.q, k, v, mask=seen, scale=call.scale, init=total)
    elif call.masks is None:
        out, lse = attend_block(call.q, k, v, scale=call.scale, init=total)
    else:
        masks = [call.masks[owner] for owner in owners]
        mask = masks[0] if len(masks) == 1 else torch.cat(masks, dim=-1)
        keep, bias = (mask, None) if mask.dtype == torch.bool else (None, mask)
        out, lse = attention(call.q, k, v, mask=keep, bias=bias, scale=call.scale, init=total)
    # In half precision every turn would round the total once more.
    return out.to(lse.dtype), lse
