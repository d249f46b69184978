"""Splits tokens over ranks and reads the other ranks' keys and values one step late (arXiv 2402.19481)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from partsong.knobs import Count, Whole
from partsong.parallel.adapters import Adapter
from partsong.parallel.attention_call import AttentionCall, AttentionShape, Inner, Runs, Stage, shard_runs
from partsong.parallel.exchange.displaced_borders import DisplacedBorders
from partsong.parallel.exchange.key_blocks import unpack_keys_values
from partsong.parallel.exchange.rotating_slots import RotatingSlots
from partsong.parallel.exchange.rotation import Rotation, View, rotation_of, visible
from partsong.parallel.exchange.slots import Slots
from partsong.parallel.exchange.wires import WireName, border_wire_of, bytes_sent, rounding, wire_of
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Axis, Mesh
from partsong.parallel.strategy import Kind, Strategy

__all__ = ["DisplacedPatch", "DisplacedStage", "SlotsKey", "WarmUp", "attend_to"]

#: First steps that wait for fresh values.
WarmUp = Annotated[int, Whole(1, why="the first step has nothing old to read")]

#: Key of slots: layer, wave and guidance branch.
SlotsKey = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class DisplacedPatch(Strategy):
    """Splits tokens over ranks; after the warm-up each attends to its own fresh keys and to a forecast of the others'.

    Diffusion changes little from step to step. So no rank waits for the exchange: keys and values travel while ranks
    compute, and are read one step later. DistriFusion reads them as they are (``order=0``). By default they are
    extrapolated here from the last two steps: a rank sends its own as they will be in the next step, which moves no
    more bytes. Approximate; with ``warmup_steps`` at or above the number of steps it is exact.

    Use it when links are slow, steps are many, and the picture may differ a little.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        warmup_steps: first steps that wait for fresh keys and values; the first step always does.
        order: 0 reads the last step's keys and values, 1 extrapolates linearly in time from the last two steps.
        norms: on UNets, ``fresh`` waits for the statistics of group norms, a few numbers per layer. ``forecast``
            displaces them too: those of one other rank are extrapolated, those of several are last step's.
        wire: how keys and values are written into messages after the warm-up (docs/wires.md); ``none`` sends them as
            they are.

    Source: DistriFusion, arXiv 2402.19481, carried over to transformers; the forecast is partsong's.
    """

    axes: ClassVar[tuple[str, ...]] = ("patch",)
    uneven_axes: ClassVar[tuple[str, ...]] = ("patch",)
    kind: ClassVar[Kind] = "approximate"
    reads_last_step: ClassVar[bool] = True

    degree: Count | None = None
    warmup_steps: WarmUp = 2
    order: Literal[0, 1] = 1
    norms: Literal["fresh", "forecast"] = "fresh"
    wire: WireName = "none"

    def stale(self) -> str:
        """Says what is old, and how it is read."""
        how = "one step old" if self.order == 0 else "extrapolated from the last two steps"
        return f"after {self.warmup_steps} steps, keys and values of the other ranks are {how}"

    def rounded(self) -> str | None:
        """Says what the wire compresses."""
        return rounding(self.wire, "keys and values", self.warmup_steps)

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models without keys and values to displace."""
        if adapter.linear_attention and not adapter.attention:
            return "linear attention exchanges one small matrix per head, too little to displace; use Ulysses"
        return super(DisplacedPatch, self).refuses(adapter)

    def borders(self, axis: Axis, clock: StepClock) -> DisplacedBorders:
        """Returns displaced border rows; norms are displaced too where they are forecast."""
        is_fresh, wire = self.norms == "fresh", border_wire_of(self.wire)
        return DisplacedBorders(axis, clock, self.warmup_steps, self.order, fresh_norms=is_fresh, wire=wire)

    def stages(self, mesh: Mesh, clock: StepClock) -> list[DisplacedStage]:
        """Returns the attention stages this strategy adds to a plan."""
        return [DisplacedStage(mesh.lane("patch"), clock, self)]


class DisplacedStage(Stage):
    """Attends to own fresh and others' forecast keys, and sends the fresh ones for the next step."""

    def __init__(self, axis: Axis, clock: StepClock, knobs: DisplacedPatch) -> None:
        self.axis, self.clock, self.knobs, self.wire = axis, clock, knobs, wire_of(knobs.wire)
        #: Rows that travel compressed, or in turns, are extrapolated from what their readers know as well.
        self.sends_ahead = self.wire is None
        self.slots: dict[SlotsKey, Slots] = {}
        self.rotating: dict[SlotsKey, RotatingSlots] = {}
        self._last_kept = 0
        clock.on_begin(self.reset)
        clock.on_end(self.settle)
        clock.on_change(self.forget)

    def forget(self, branch: int) -> None:
        """Waits for pending messages of one branch, and forgets them."""
        for kept in (self.slots, self.rotating):
            for key in [key for key in kept if key[2] == branch]:
                kept.pop(key).settle()

    def reset(self) -> None:
        """Begins a generation."""
        self.settle()

    def settle(self) -> None:
        """Waits for pending messages and forgets them."""
        self._last_kept = self._bytes() or self._last_kept
        for slots in (*self.slots.values(), *self.rotating.values()):
            slots.settle()
        self.abandon()

    def kept(self) -> str | None:
        """Says how much memory keys and values of earlier steps take, in this generation or the last one."""
        kept = self._bytes() or self._last_kept
        return f"keys and values of earlier steps: {kept / 1e6:,.1f} MB on this rank" if kept else None

    def _bytes(self) -> int:
        return sum(slots.nbytes for slots in (*self.slots.values(), *self.rotating.values()))

    def abandon(self) -> None:
        """Forgets pending messages without waiting, after an error."""
        self.slots.clear()
        self.rotating.clear()

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Attends with the local queries to all slots; `inner` computes it."""
        key, runs = (call.layer, call.wave, self.clock.branch), shard_runs(call)
        if key in self.rotating:
            return self.run_rotating(call, self.rotating[key], inner)
        slots = self.slots.get(key)
        if slots is None:
            ahead = self.sends_ahead and self.clock.num_steps is not None
            slots = self.slots[key] = Slots(self.axis, runs, self.clock, self.knobs.order, ahead=ahead)
        assert slots.runs == runs, "the token count changed within a generation"
        if self.clock.step < self.knobs.warmup_steps or slots.is_empty:
            return self.run_warmup(call, slots, inner)
        return self.run_after_warmup(call, key, slots, inner)

    def run_after_warmup(self, call: AttentionCall, key: SlotsKey, slots: Slots, inner: Inner) -> Tensor:
        """Attends in a step after the warm-up; the first one decides how keys and values are kept from then on."""
        if self.wire is None and self.sends_everything(slots.runs, call.layer):
            return self.run_displaced(call, slots, inner)
        del self.slots[key]
        rotations = self.rotations(slots.runs, call.layer)
        self.rotating[key] = RotatingSlots(slots, call.layer, rotations, self.wire, self.clock)
        return self.run_rotating(call, self.rotating[key], inner)

    def sends_everything(self, runs: tuple[Runs, ...], layer: int) -> bool:
        """Says whether every step after the warm-up sends all rows to all ranks."""
        return True

    def rotations(self, runs: tuple[Runs, ...], layer: int) -> list[Rotation]:
        """Returns what each rank sends in a step after the warm-up: all its rows to all others."""
        return [rotation_of(runs, sender, math.inf, 1.0) for sender in range(len(runs))]

    def run_warmup(self, call: AttentionCall, slots: Slots, inner: Inner) -> Tensor:
        """Attends to the fresh keys of all ranks."""
        return attend_to(slots.gather(call, self.knobs.warmup_steps), everything(slots.runs), call, inner)

    def run_displaced(self, call: AttentionCall, slots: Slots, inner: Inner) -> Tensor:
        """Attends to own fresh keys and to a forecast of the others', all of the last step."""
        rows = slots.forecast(call)
        if not self.clock.is_last_step:
            slots.send(rows)
        return attend_to(rows, everything(slots.runs), call, inner)

    def run_rotating(self, call: AttentionCall, slots: RotatingSlots, inner: Inner) -> Tensor:
        """Attends to own fresh keys and to a forecast of the others', whose rows are sent in turns or compressed."""
        assert slots.runs == shard_runs(call), "the token count changed within a generation"
        rows = slots.forecast(call)
        if not self.clock.is_last_step:
            slots.send(rows)
        return attend_to(rows, everything(slots.runs), call, inner)

    def predict(self, shape: AttentionShape) -> tuple[int, tuple[AttentionShape, ...]]:
        """Returns the bytes this rank sends in a step; nothing in the last one, unless that is synchronous."""
        row = (shape.batch, 2, shape.kv_heads, shape.head_dim)
        if shape.step < self.knobs.warmup_steps:
            return shape.sizes[shape.index] * (self.axis.size - 1) * math.prod(row) * shape.itemsize, (shape,)
        if shape.is_last:
            return 0, (shape,)
        rotation = self.rotations(shard_runs(shape), shape.layer)[shape.index]
        counts = rotation.counts(shape.step, shape.layer)
        return sum(bytes_sent(self.wire, (rows, *row), shape.itemsize) for rows in counts), (shape,)


@functools.lru_cache(maxsize=1024)
def everything(runs: tuple[Runs, ...]) -> View:
    """Returns the view that holds all rows of every shard."""
    return tuple(visible(shard, 1, math.inf) for shard in runs)


def attend_to(rows: Tensor, view: View, call: AttentionCall, inner: Inner) -> Tensor:
    """Attends with a call's queries to the keys and values in a buffer, which holds the rows of `view`."""
    k, v = unpack_keys_values(rows)
    pieces = [(index, stream, part) for index, shard in enumerate(view) for stream, part in shard]
    runs = tuple((stream, part.stop - part.start) for _, stream, part in pieces)
    masks = call.masks and tuple(call.masks[index][..., part] for index, _, part in pieces)
    return inner(replace(call, k=k, v=v, sizes=(rows.shape[0],), runs=(runs,), index=0, masks=masks))
