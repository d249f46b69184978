"""Displaced patch parallelism: the other ranks' keys and values are one step old (arXiv 2402.19481)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from partsong.errors import ArgumentError
from partsong.parallel.clock import StepClock
from partsong.parallel.collectives import Pending, all_gather, all_to_all
from partsong.parallel.mesh import Axis, Mesh
from partsong.parallel.ring import unpack_keys_values, write_keys_values
from partsong.parallel.sequence import AttentionCall, AttentionShape
from partsong.parallel.shards import offsets
from partsong.parallel.strategy import Kind, Strategy

__all__ = ["DisplacedPatch", "DisplacedStage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DisplacedPatch(Strategy):
    """Splits tokens over ranks; after the warm-up each attends to its own fresh keys and to the others' last ones.

    Diffusion changes little from step to step, so the exchange needs not be waited for: it travels behind the
    computation and is read one step later. Approximate; with ``warmup_steps`` at or above the number of steps it is
    exact.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        warmup_steps: first steps that wait for fresh keys and values; at least 1, since there is nothing old to read
            in the first step.

    Source: DistriFusion, arXiv 2402.19481, carried over to transformers.

    Example:
        >>> DisplacedPatch(warmup_steps=4).kind
        'approximate'
    """

    axes: ClassVar[tuple[str, ...]] = ("patch",)
    kind: ClassVar[Kind] = "approximate"

    degree: int | None = None
    warmup_steps: int = 2

    def validate(self) -> None:
        """Refuses a warm-up of less than one step."""
        super(DisplacedPatch, self).validate()
        if isinstance(self.warmup_steps, bool) or not isinstance(self.warmup_steps, int) or self.warmup_steps < 1:
            raise ArgumentError(
                f"DisplacedPatch: warmup_steps={self.warmup_steps!r}; use 1 or more, the first step has nothing old "
                "to read"
            )

    def stages(self, mesh: Mesh, clock: StepClock) -> list[DisplacedStage]:
        """The attention stages this strategy adds to a plan."""
        return [DisplacedStage(mesh.axis("patch"), clock, self.warmup_steps)]


class _Slots:
    """Keys and values of all ranks for one layer and branch, twice: one to read, one to receive into."""

    def __init__(self, like: Tensor, sizes: tuple[int, ...]) -> None:
        batch, heads, _, dim = like.shape
        shape = (sum(sizes), batch, 2, heads, dim)
        self.shape_key = (shape, like.dtype, sizes)
        self.now, self.next = like.new_empty(shape), like.new_empty(shape)
        self.pending: Pending | None = None


class DisplacedStage:
    """Attends to own fresh and others' stale keys, and sends the fresh ones for the next step."""

    def __init__(self, axis: Axis, clock: StepClock, warmup_steps: int) -> None:
        self.axis, self.clock, self.warmup_steps = axis, clock, warmup_steps
        self._slots: dict[tuple[int, int], _Slots] = {}
        clock.on_begin(self.reset)

    def reset(self) -> None:
        """Waits for what is under way and forgets it."""
        for slots in self._slots.values():
            if slots.pending is not None:
                slots.pending.wait()
        self._slots.clear()

    def abandon(self) -> None:
        """Forgets what is under way without waiting, after an error."""
        self._slots.clear()

    def run(self, call: AttentionCall, inner: Any) -> Tensor:
        """Attention of the local queries to all slots; `inner` computes it."""
        key = (call.layer, self.clock.branch)
        slots = self._slots.get(key)
        sizes = call.sizes
        fresh = slots is None or self.clock.step < self.warmup_steps
        if slots is None:
            slots = self._slots[key] = _Slots(call.k, sizes)
        assert slots.shape_key[0][0] == sum(sizes), "the token count changed within a generation"
        if slots.pending is not None:
            slots.pending.wait()
            slots.pending = None
        start = offsets(sizes)[self.axis.index]
        write_keys_values(slots.now[start : start + sizes[self.axis.index]], call.k, call.v)
        whole = slots.now
        if fresh:
            all_gather(self.axis, whole, sizes, name="displaced patches, warm-up").wait()
        elif not self.clock.is_last_step:
            self._send_on(slots, sizes, start)
        k, v = unpack_keys_values(whole)
        return inner(AttentionCall(call.layer, call.q, k, v, (sum(sizes),), 0, call.masks, call.scale))

    def _send_on(self, slots: _Slots, sizes: tuple[int, ...], start: int) -> None:
        own = slots.now[start : start + sizes[self.axis.index]]
        recvs = slots.next.split(list(sizes))
        slots.pending = all_to_all(self.axis, [own] * self.axis.size, recvs, name="displaced patches")
        slots.now, slots.next = slots.next, slots.now

    def predict(self, shape: AttentionShape) -> tuple[int, AttentionShape]:
        """Bytes this rank sends in a step: its keys and values to every other rank (none in the last step)."""
        unit = shape.batch * 2 * shape.kv_heads * shape.head_dim * shape.itemsize
        return shape.sizes[shape.index] * unit * (self.axis.size - 1), shape

