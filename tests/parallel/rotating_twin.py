"""Attention over keys that take turns and travel by wires, simulated in one process from the definition.

A rank knows of each token of the others one or two values, each for a step. After the warm-up these are the value of
its last step and, where there are two such steps, the forecast of the next. In every later step it is sent some of the
tokens as they will be in the next step, along the line through this step and the one before. It reads the last value it
knows, and half of the line from the one before it carried on, at most two intervals far.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from partsong import DisplacedPatch, PartialPatch, Ring
from partsong.parallel.exchange.wires import Wire, wire_of
from tests.parallel.displaced_worker import TIMES, Simulated

Rows = Sequence[list[tuple[str, int]]]
#: What is known of a token: the step that a value is for, and the value `[2, B, H, D]`.
Known = list[tuple[int, Tensor]]


def reach(before: int, last: int, to: int) -> float:
    """The interval to a step over the one before it, at most 2."""
    first, second, third = (TIMES[step] for step in (before, last, to))
    return min((third - second) / (second - first), 2.0)


class Rotating(Simulated):
    """Attention to what a rank knows of the others' tokens.

    Args:
        parts: the ranks.
        knobs: the strategy.
        streams: what each attention mixes.
        portions: the portion of each attention layer; none of them is of `DisplacedPatch`.
        merged: tokens are cut into this many times more runs, which neighbours put together again.
    """

    def __init__(
        self, parts: int, knobs: DisplacedPatch, streams: Sequence[Any], portions: Sequence[float], merged: int = 1
    ) -> None:
        super().__init__(parts, knobs.warmup_steps, knobs.order, streams, merged)
        self.far, self.portions = knobs.far if isinstance(knobs, PartialPatch) else 1.0, portions
        self.wire, self.known = wire_of(knobs.wire), dict[tuple[int, int, int, int], Known]()
        self._sent: Counter[tuple[int, int]] = Counter()

    def rows_sent(self, step: int, sender: int) -> int:
        """Rows that a rank sends in a step, in all layers and branches."""
        return self._sent[step, sender]

    def number(self, layer: int) -> int:
        """The number of a layer among those that are shared."""
        return sum(streams is not None for streams in self.streams[:layer])

    def due(self, layer: int, step: int, sender: int, rows: Rows) -> dict[int, list[int]]:
        """For each viewer the tokens that it is sent by a rank in a step."""
        portion, number = self.portions[self.number(layer)], self.number(layer)
        if portion >= self.parts - 1:
            return {viewer: [place for _, place in rows[sender]] for viewer in range(self.parts) if viewer != sender}

        def images(rank: int) -> list[int]:
            return [place for stream, place in rows[rank] if stream == "image"]

        def reached(rank: int, viewer: int) -> int:
            share = Fraction(str(portion)) - (abs(rank - viewer) - 1)
            return math.ceil(min(max(share, Fraction(0)), Fraction(1)) * len(images(rank)))

        def busy(rank: int) -> int:
            text = len(rows[rank]) - len(images(rank))
            return sum(text + reached(rank, viewer) for viewer in range(self.parts) if viewer != rank)

        always, rest = {}, {}
        for viewer in (viewer for viewer in range(self.parts) if viewer != sender):
            count, own = math.floor((1 - Fraction(str(self.far))) * reached(sender, viewer)), images(sender)
            always[viewer] = own[len(own) - count :] if viewer > sender else own[:count]
            rest[viewer] = [place for _, place in rows[sender] if place not in always[viewer]]
        budget = max(map(busy, range(self.parts))) - sum(map(len, always.values()))
        taken, blocks = self.turns(rest, max(budget, self.parts - 1))
        first = (step + number) * taken
        for viewer, parts in blocks.items():
            for turn in range(first, first + taken):
                always[viewer] += parts[turn % len(parts)]
        return always

    def turns(self, rest: dict[int, list[int]], budget: int) -> tuple[int, dict[int, list[list[int]]]]:
        """How many blocks a step sends, and the blocks: those that spend most of the budget, and few of them."""
        best: tuple[Any, ...] = (Fraction(0),)
        for number in range(1, 60):
            blocks = {
                viewer: [[places[i] for i in part.tolist()] for part in torch.arange(len(places)).tensor_split(number)]
                for viewer, places in rest.items()
            }
            for taken in range(1, number + 1):
                turns = [
                    sum(len(parts[(first + turn) % number]) for parts in blocks.values() for turn in range(taken))
                    for first in range(number)
                ]
                if max(turns) <= budget and Fraction(taken, number) > best[0]:
                    best = (Fraction(taken, number), taken, blocks)
            if number >= 16 and best[0]:
                break
        return best[1], best[2]

    def begun(self, layer: int, place: int) -> Known:
        """What is known of a token after the warm-up."""
        past = [self.past[layer, self.branch, step][..., place, :] for step in range(self.warmup)]
        if not self.order or self.warmup < 2:
            return [(self.warmup - 1, past[-1])]
        ratio = reach(self.warmup - 2, self.warmup - 1, self.warmup)
        return [(self.warmup - 1, past[-1]), (self.warmup, past[-1] + ratio * (past[-1] - past[-2]))]

    def read(self, known: Known, step: int) -> Tensor:
        """What is read in a step."""
        last = known[-1][1]
        if not self.order or len(known) < 2 or known[-1][0] == step:
            return last
        return last + 0.5 * reach(known[-2][0], known[-1][0], step) * (last - known[-2][1])

    def remembered(self, layer: int, rank: int, rows: Rows) -> Tensor:
        if self.step < self.warmup or (self.portions[self.number(layer)] >= self.parts - 1 and self.wire is None):
            return super().remembered(layer, rank, rows)
        guess = self.past[layer, self.branch, self.step].clone()
        for place in (place for sender, own in enumerate(rows) for _, place in own if sender != rank):
            known = self.known.setdefault((layer, self.branch, rank, place), self.begun(layer, place))
            guess[..., place, :] = self.read(known, self.step)
        if self.step < len(TIMES) - 1:
            for sender in range(self.parts):
                self.receive(layer, rank, sender, rows)
        return guess

    def receive(self, layer: int, rank: int, sender: int, rows: Rows) -> None:
        """Takes what a rank sends in this step."""
        due = self.due(layer, self.step, sender, rows)
        self._sent[self.step, sender] += len(due.get(rank, ()))
        if sender == rank or not due[rank]:
            return
        fresh = self.past[layer, self.branch, self.step][..., due[rank], :]
        before = self.past[layer, self.branch, self.step - 1][..., due[rank], :]
        ahead = fresh
        if self.order:
            ahead = fresh + reach(self.step - 1, self.step, self.step + 1) * (fresh - before)
        memory = [self.known[layer, self.branch, rank, place] for place in due[rank]]
        if self.wire is not None:
            base = torch.zeros_like(ahead)
            if self.wire.is_residual:
                base = torch.stack([self.read(known, self.step + 1) for known in memory], dim=-2)
            ahead = base + by_wire(self.wire, ahead - base)
        for column, known in enumerate(memory):
            known.append((self.step + 1, ahead[..., column, :]))


class Passing(Simulated):
    """Attention to fresh keys that went around a ring by a wire.

    A block that travels by a residual wire is what is left after the last values that all read of it, with half of the
    line through the last two carried on. In the first two steps it travels as it is.

    Args:
        parts: the ranks.
        knobs: the strategy.
        streams: what each attention mixes.
    """

    def __init__(self, parts: int, knobs: Ring, streams: Sequence[Any]) -> None:
        super().__init__(parts, 0, 0, streams)
        self.wire, self.read = wire_of(knobs.wire), dict[tuple[int, int, int], Tensor]()

    def remembered(self, layer: int, rank: int, rows: Rows) -> Tensor:
        if rank == 0:
            self.read[layer, self.branch, self.step] = self.pass_on(layer, rows)
        return self.read[layer, self.branch, self.step]

    def pass_on(self, layer: int, rows: Rows) -> Tensor:
        """What all read of the blocks of all ranks."""
        assert self.wire is not None
        fresh = self.past[layer, self.branch, self.step]
        if self.wire.is_residual and self.step < 2:
            return fresh.clone()
        base = torch.zeros_like(fresh)
        if self.wire.is_residual:
            older, last = (self.read[layer, self.branch, self.step - back] for back in (2, 1))
            base = last + 0.5 * reach(self.step - 2, self.step - 1, self.step) * (last - older)
        out = torch.empty_like(fresh)
        for own in ([place for _, place in shard] for shard in rows):
            out[..., own, :] = base[..., own, :] + by_wire(self.wire, (fresh - base)[..., own, :])
        return out


def by_wire(wire: Wire, values: Tensor) -> Tensor:
    """What arrives of values `[2, B, H, L, D]`."""
    block = values.permute(3, 1, 0, 2, 4).contiguous()
    arrived = wire.decode(wire.encode(block), tuple(block.shape)).to(values.dtype)
    return arrived.permute(2, 1, 3, 0, 4)
