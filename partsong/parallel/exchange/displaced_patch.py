"""Splits tokens over ranks and reads the other ranks' keys and values one step late (arXiv 2402.19481)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from partsong.knobs import Count, Whole
from partsong.parallel.adapters import Adapter
from partsong.parallel.attention_call import AttentionCall, AttentionShape, Inner, Stage, own_rows, shard_runs
from partsong.parallel.exchange.borders import DisplacedBorders
from partsong.parallel.exchange.key_blocks import empty_block, unpack_keys_values
from partsong.parallel.exchange.slots import Slots, View, num_rows, view_of, visible
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Axis, Mesh
from partsong.parallel.strategy import Kind, Strategy

__all__ = ["DisplacedPatch", "DisplacedStage", "WarmUp", "attend_to"]

#: First steps that wait for fresh values.
WarmUp = Annotated[int, Whole(1, why="the first step has nothing old to read")]


@dataclass(frozen=True, kw_only=True, slots=True)
class DisplacedPatch(Strategy):
    """Splits tokens over ranks; after the warm-up each attends to its own fresh keys and to a forecast of the others'.

    Diffusion changes little from step to step. So no rank waits for the exchange: keys and values travel while ranks
    compute, and are read one step later. DistriFusion reads them as they are (``order=0``). By default they are
    extrapolated here from the last two steps, which moves no more bytes and costs one more buffer. Approximate; with
    ``warmup_steps`` at or above the number of steps it is exact.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        warmup_steps: first steps that wait for fresh keys and values; the first step always has to.
        order: 0 reads the last step's keys and values, 1 extrapolates linearly in time from the last two steps.
        norms: on UNets, ``fresh`` waits for the statistics of group norms, a few numbers per layer. ``forecast``
            displaces them too, which spoils pictures on four ranks with few rows each.

    Source: DistriFusion, arXiv 2402.19481, carried over to transformers; the forecast is partsong's.
    """

    axes: ClassVar[tuple[str, ...]] = ("patch",)
    kind: ClassVar[Kind] = "approximate"
    reads_last_step: ClassVar[bool] = True

    degree: Count | None = None
    warmup_steps: WarmUp = 2
    order: Literal[0, 1] = 1
    norms: Literal["fresh", "forecast"] = "fresh"

    def stale(self) -> str:
        """Says what is old, and how it is read."""
        how = "one step old" if self.order == 0 else "extrapolated from the last two steps"
        return f"after {self.warmup_steps} steps, keys and values of the other ranks are {how}"

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models without keys and values to displace."""
        if adapter.linear_attention and not adapter.attention:
            return "linear attention exchanges one small matrix per head, too little to displace; use Ulysses"
        return super(DisplacedPatch, self).refuses(adapter)

    def borders(self, axis: Axis, clock: StepClock) -> DisplacedBorders:
        """Returns border rows as old as the keys and values; norms are as old where they are forecast."""
        return DisplacedBorders(axis, clock, self.warmup_steps, self.order, fresh_norms=self.norms == "fresh")

    def stages(self, mesh: Mesh, clock: StepClock) -> list[DisplacedStage]:
        """Returns the attention stages this strategy adds to a plan."""
        return [DisplacedStage(mesh.axis("patch"), clock, self.warmup_steps, self.order)]


class DisplacedStage(Stage):
    """Attends to own fresh and others' forecast keys, and sends the fresh ones for the next step."""

    def __init__(self, axis: Axis, clock: StepClock, warmup_steps: int, order: int) -> None:
        self.axis, self.clock, self.warmup_steps, self.order = axis, clock, warmup_steps, order
        self._slots: dict[tuple[int, int, int], Slots] = {}
        clock.on_begin(self.reset)

    def reset(self) -> None:
        """Waits for what is under way and forgets it."""
        for slots in self._slots.values():
            slots.settle()
        self._slots.clear()

    def abandon(self) -> None:
        """Forgets what is under way without waiting, after an error."""
        self._slots.clear()

    def portion(self, layer: int) -> float:
        """Returns how far this rank sees, in patches: without a limit."""
        return math.inf

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Attends with the local queries to all slots; `inner` computes it."""
        key, runs = (call.layer, call.wave, self.clock.branch), shard_runs(call)
        slots = self._slots.get(key)
        if slots is None:
            like = empty_block(call.k, 0)
            slots = self._slots[key] = Slots(self.axis, runs, like, self.portion(call.layer), self.order)
        assert slots.runs == runs, "the token count changed within a generation"
        if self.clock.step < self.warmup_steps or slots.is_empty:
            return self.run_warmup(call, slots, inner)
        return self.run_displaced(call, slots, inner)

    def run_warmup(self, call: AttentionCall, slots: Slots, inner: Inner) -> Tensor:
        """Attends to the fresh keys of all ranks."""
        return attend_to(slots.gather(call), view_of(slots.runs, self.axis.index, math.inf), call, inner)

    def run_displaced(self, call: AttentionCall, slots: Slots, inner: Inner) -> Tensor:
        """Attends to own fresh keys and to a forecast of the others'."""
        rows = slots.forecast(call, self.clock.step_ratio if self.order else None)
        if not self.clock.is_last_step:
            slots.send(rows)
        return attend_to(rows, slots.view, call, inner)

    def predict(self, shape: AttentionShape) -> tuple[int, AttentionShape]:
        """Returns the bytes this rank sends in a step: to each other rank what that one sees, in the last nothing."""
        is_warm = shape.step < self.warmup_steps
        if shape.is_last and not is_warm:
            return 0, shape
        own, portion = shard_runs(shape)[shape.index], math.inf if is_warm else self.portion(shape.layer)
        peers = (peer for peer in range(self.axis.size) if peer != shape.index)
        rows = sum(num_rows(visible(own, peer - shape.index, portion)) for peer in peers)
        return rows * shape.batch * 2 * shape.kv_heads * shape.head_dim * shape.itemsize, shape


def attend_to(rows: Tensor, view: View, call: AttentionCall, inner: Inner) -> Tensor:
    """Attends with a call's queries to the keys and values in a buffer, which holds the rows of `view`."""
    k, v = unpack_keys_values(rows)
    pieces = [(index, stream, part) for index, shard in enumerate(view) for stream, part in shard]
    runs = tuple((stream, part.stop - part.start) for _, stream, part in pieces)
    masks = own_rows(call)
    masks = masks and tuple(masks[index][..., part] for index, _, part in pieces)
    return inner(replace(call, k=k, v=v, sizes=(rows.shape[0],), runs=(runs,), index=0, masks=masks))
