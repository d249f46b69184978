"""Keeps the last known keys and values of all ranks; every step refreshes all or some of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from partsong.parallel.attention_call import AttentionCall
from partsong.parallel.exchange.key_blocks import write_keys_values
from partsong.parallel.exchange.known_rows import KnownRows, Part, Stretch
from partsong.parallel.exchange.rotation import Rotation, Slices, count_rows
from partsong.parallel.exchange.slots import Slots
from partsong.parallel.exchange.wires import Wire
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import Pending, exchange
from partsong.parallel.ranks.shards import offsets

__all__ = ["RotatingSlots"]


class RotatingSlots:
    """Holds the two last known values, of any steps, for each row of one layer and branch.

    A rank sends its rows extrapolated to the next step along a straight line through this step and the one before,
    since only it knows both exactly. Rows that are read later are extrapolated further by their age.

    With a residual wire, the base is what the receiver would read in the step the message is for. The
    sender keeps the same values of its own rows, and decodes its own messages as the others do.

    Args:
        whole: the gathered values of the warm-up; their buffers are reused.
        layer: number of the layer, which decides its turn.
        rotations: what each rank sends, in order of ranks.
        wire: how rows are written into messages; None sends them as they are.
        clock: where the generation stands.

    Attributes:
        runs: the token runs of every shard.
        known: the last known values of all rows; with a wire, those of its own rows that the others know.
    """

    def __init__(
        self, whole: Slots, layer: int, rotations: Sequence[Rotation], wire: Wire | None, clock: StepClock
    ) -> None:
        whole.settle()
        self.axis, self.runs, self.own, self.layer, self.wire = whole.axis, whole.runs, whole.own, layer, wire
        self._rotations, self._clock = tuple(rotations), clock
        self._before, self._step = whole.held[-1][self.own].clone(), whole.steps[-1]
        self._order = whole.order
        self._pending: Pending | None = None
        self._under_way: list[tuple[Tensor, list[Part]]] = []
        last, older, steps = whole.held[-1], None, (self._step, self._step)
        if len(whole.held) == 2:
            # The values of the warm-up are stored as if its last step had sent a forecast of this one.
            ratio = Stretch(self.own, (whole.steps[0], self._step)).ratio(clock, clock.step)
            older, last, steps = last, whole.held[0].lerp_(last, 1.0 + ratio), (self._step, clock.step)
        elif whole.order:
            older = torch.empty_like(last)
        # A line through older values takes rows of more than a step ago, or differences from them.
        is_read = wire is None or wire.is_residual or any(rotation.takes_turns for rotation in rotations)
        self.known = KnownRows(last, older if is_read else None, wire)
        self._stretches = [self._cut(sender, steps) for sender in range(self.axis.size)]

    def _cut(self, sender: int, steps: tuple[int, int]) -> dict[int, Stretch]:
        """Returns the stretches in which this rank is (or would be) sent a rank's rows, by their first row."""
        me, rotation = self.axis.index, self._rotations[sender]
        viewer = me if sender != me else (me + 1) % self.axis.size
        start = offsets([sum(length for _, length in shard) for shard in self.runs])[sender]
        parts = (*rotation.always[viewer], *(rows for block in rotation.blocks for rows in block[viewer]))
        return {rows.start: Stretch(slice(start + rows.start, start + rows.stop), steps) for rows in parts}

    def forecast(self, call: AttentionCall) -> Tensor:
        """Returns this rank's fresh rows and the last known values of the others', extrapolated by their age."""
        self.settle()
        now = torch.empty_like(self.known.last)
        for sender, stretches in enumerate(self._stretches):
            if sender != self.axis.index:
                for stretch in stretches.values():
                    now[stretch.rows] = self.known.carried(stretch, stretch.ratio(self._clock, self._clock.step))
        write_keys_values(now[self.own], call.k, call.v)
        return now

    def send(self, now: Tensor) -> None:
        """Sends each rank those of this rank's rows in `now` that are due, and receives those of the others."""
        me, target = self.axis.index, self._target(now[self.own])
        sends: dict[int, Tensor] = {}
        recvs: dict[int, Tensor] = {}
        for sender, rotation in enumerate(self._rotations):
            due = rotation.due(self._clock.step, self.layer)
            if sender == me and self.wire is None:
                sends = {peer: _packed(target, slices) for peer, slices in enumerate(due) if slices}
            elif sender == me:  # all others get the same message, and it is decoded here as well
                slices = next(filter(None, due))
                parts = self._parts(me, slices)
                message = self.known.encode([target[rows] for rows in slices], parts)
                sends = {peer: message for peer in range(self.axis.size) if peer != me}
                self._under_way.append((message, parts))
            elif due[me]:
                recvs[sender] = self.known.room(count_rows(due[me]))
                self._under_way.append((recvs[sender], self._parts(sender, due[me])))
        self._pending = exchange(self.axis, sends, recvs, name="displaced patches")

    @property
    def nbytes(self) -> int:
        """Returns the bytes of what is kept from one step to the next."""
        messages = (message for message, _ in self._under_way)
        return sum(
            kept.nbytes for kept in (self.known.last, self.known.older, self._before, *messages) if kept is not None
        )

    def _target(self, fresh: Tensor) -> Tensor:
        """Returns this rank's rows, extrapolated to the next step from the last two, in memory of their own."""
        step = self._clock.step
        ratio = Stretch(self.own, (self._step, step)).ratio(self._clock, step + 1)
        target = torch.lerp(self._before, fresh, 1.0 + ratio) if self._order else fresh.clone()
        self._before.copy_(fresh)
        self._step = step
        return target

    def _parts(self, sender: int, slices: Slices) -> list[Part]:
        stretches = [self._stretches[sender][rows.start] for rows in slices]
        return [(stretch, stretch.ratio(self._clock, self._clock.step + 1)) for stretch in stretches]

    def settle(self) -> None:
        """Waits for the rows of the last step, and stores them."""
        if self._pending is None:
            return
        self._pending.wait()
        for message, parts in self._under_way:
            self.known.take(message, parts, self._step + 1)
        self._pending = None
        self._under_way.clear()


def _packed(rows: Tensor, slices: Slices) -> Tensor:
    """Copies rows into one piece of memory; contiguous ones are sent without a copy."""
    if all(one.stop == other.start for one, other in itertools.pairwise(slices)):
        return rows[slices[0].start : slices[-1].stop]
    return torch.cat([rows[part] for part in slices])
