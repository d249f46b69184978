"""Keeps the last known keys and values of all ranks, of which every step refreshes a part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.parallel.attention_call import AttentionCall
from partsong.parallel.exchange.key_blocks import write_keys_values
from partsong.parallel.exchange.rotation import Slices, rotation_of
from partsong.parallel.exchange.slots import Slots
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import Pending, exchange
from partsong.parallel.ranks.shards import offsets

__all__ = ["RotatingSlots"]

#: How much of their last change rows that take turns are carried on by. A straight line over several steps is an unsure
#: guess: on the zoo's transformer 0.4 to 0.6 come nearest to fresh rows, and 1 loses 4 dB.
TREND = 0.6


@dataclass(slots=True)
class _Segment:
    """Remembers a run of another rank's rows that is always refreshed as one.

    Attributes:
        rows: where it lies in a buffer.
        trend: how much of its last change it is carried on by.
        steps: the steps that its older and its last known values are of.
    """

    rows: slice
    trend: float
    steps: tuple[int, int]


class RotatingSlots(Slots):
    """Holds for each row of one layer and branch the two last known values, which are of different steps.

    It takes over the buffers of slots that have held whole steps so far. After that only rows that arrive are copied,
    and nothing is allocated.

    Args:
        whole: what was gathered in the warm-up, settled and not empty.
        layer: number of the layer, which decides its turn.
        portion: how far the budget of a step would reach, in patches.
        far: share of the budget that takes turns.
    """

    def __init__(self, whole: Slots, layer: int, portion: float, far: float) -> None:
        whole.settle()
        self.axis, self.runs, self.order = whole.axis, whole.runs, whole.order
        self.sizes, self.own, self.layer = whole.sizes, whole.own, layer
        self.held, self.steps = whole.held, whole.steps
        self._now = whole.free[0] if self.order else self.held[-1]
        while len(self.held) < 1 + self.order:
            self.held.insert(0, whole.free[len(self.held)])
            self.steps.insert(0, self.steps[0])
        self._rotations = [rotation_of(self.runs, sender, portion, far) for sender in range(self.axis.size)]
        self._segments = self._cut()
        self._outgoing = [self._room(self.axis.index, peer) for peer in range(self.axis.size)]
        self._incoming_rooms = [self._room(peer, self.axis.index) for peer in range(self.axis.size)]
        self._arriving: tuple[int, list[tuple[_Segment, Tensor]]] = (0, [])
        self._pending: Pending | None = None

    def _cut(self) -> dict[tuple[int, int], _Segment]:
        """Returns the segments of all other ranks' rows, by their rank and first row there."""
        me, steps, starts = self.axis.index, (self.steps[0], self.steps[-1]), offsets(self.sizes)
        segments = {}
        for sender, rotation in enumerate(self._rotations):
            if sender != me:
                turned = [rows for turn in rotation.turns for rows in turn[me]]
                for rows in (*rotation.always[me], *turned):
                    place = slice(starts[sender] + rows.start, starts[sender] + rows.stop)
                    trend = TREND if rows in turned and len(rotation.turns) > 1 else 1.0
                    segments[sender, rows.start] = _Segment(place, trend, steps)
        return segments

    def _room(self, sender: int, viewer: int) -> Tensor:
        """Makes room for the largest message from one rank to another."""
        rotation = self._rotations[sender]
        turns = [rotation.due(turn, 0)[viewer] for turn in range(len(rotation.turns))]
        most = 0 if sender == viewer else max(map(_count, turns))
        return self.held[-1].new_empty((most, *self.held[-1].shape[1:]))

    def forecast(self, call: AttentionCall, clock: StepClock) -> Tensor:
        """Returns own fresh rows and a forecast of each of the others', by its age."""
        self.settle()
        last, rows = self.held[-1], self._now
        if self.order:
            for segment in self._segments.values():
                place, ratio = segment.rows, clock.reach(*segment.steps)
                if ratio is None:
                    rows[place].copy_(last[place])
                else:
                    torch.lerp(self.held[0][place], last[place], 1.0 + segment.trend * ratio, out=rows[place])
        write_keys_values(rows[self.own], call.k, call.v)
        return rows

    def send(self, rows: Tensor, step: int) -> None:
        """Sends each rank what of this rank's rows is its turn, and receives the same of the others."""
        me, own, sends, recvs, arriving = self.axis.index, rows[self.own], {}, {}, []
        for peer, slices in enumerate(self._rotations[me].due(step, self.layer)):
            if slices:
                sends[peer] = _packed(own, slices, self._outgoing[peer])
        for peer, rotation in enumerate(self._rotations):
            slices = rotation.due(step, self.layer)[me]
            if slices:
                recvs[peer] = self._incoming_rooms[peer][: _count(slices)]
                parts = recvs[peer].split([part.stop - part.start for part in slices])
                segments = [self._segments[peer, part.start] for part in slices]
                arriving += zip(segments, parts, strict=True)
        self._arriving = step, arriving
        self._pending = exchange(self.axis, sends, recvs, name="displaced patches")

    def settle(self) -> None:
        """Waits for the rows of the last step, and puts them beside those they replace."""
        if self._pending is None:
            return
        self._pending.wait()
        step, arrived = self._arriving
        for segment, part in arrived:
            place, last = segment.rows, self.held[-1]
            if self.order:
                self.held[0][place].copy_(last[place])
            last[place].copy_(part)
            segment.steps = segment.steps[-1], step
        self._pending = None


def _count(slices: Slices) -> int:
    return sum(rows.stop - rows.start for rows in slices)


def _packed(own: Tensor, slices: Slices, room: Tensor) -> Tensor:
    """Puts rows into one piece of memory; a single run is sent from where it is."""
    if len(slices) == 1:
        return own[slices[0]]
    packed = room[: _count(slices)]
    torch.cat([own[rows] for rows in slices], out=packed)
    return packed
