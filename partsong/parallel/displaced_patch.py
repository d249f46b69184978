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
    """Splits tokens over ranks; after the warm-up each attends to its own fresh keys and to a forecast of the others'.

    Diffusion changes little from step to step, so the exchange needs not be waited for: keys and values travel behind
    the computation and are read one step later. DistriFusion reads them as they are (``order=0``); here they are by
    default carried on along the line through the last two steps, which moves no byte more and costs one more buffer.
    Approximate; with ``warmup_steps`` at or above the number of steps it is exact.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        warmup_steps: first steps that wait for fresh keys and values; at least 1, since there is nothing old to read
            in the first step.
        order: 0 reads the last step's keys and values, 1 extrapolates linearly in time from the last two steps.

    Source: DistriFusion, arXiv 2402.19481, carried over to transformers; the forecast is partsong's.

    Example:
        >>> DisplacedPatch(warmup_steps=4).kind
        'approximate'
    """

    axes: ClassVar[tuple[str, ...]] = ("patch",)
    kind: ClassVar[Kind] = "approximate"

    degree: int | None = None
    warmup_steps: int = 2
    order: int = 1

    def validate(self) -> None:
        """Refuses a warm-up of less than one step and orders other than 0 and 1."""
        super(DisplacedPatch, self).validate()
        if isinstance(self.warmup_steps, bool) or not isinstance(self.warmup_steps, int) or self.warmup_steps < 1:
            raise ArgumentError(
                f"DisplacedPatch: warmup_steps={self.warmup_steps!r}; use 1 or more, the first step has nothing old "
                "to read"
            )
        if isinstance(self.order, bool) or self.order not in (0, 1):
            raise ArgumentError(f"DisplacedPatch: order={self.order!r}; use 0 (one step old) or 1 (extrapolated)")

    def stale(self) -> str:
        """What is old, and how it is read."""
        how = "one step old" if self.order == 0 else "extrapolated from the last two steps"
        return f"after {self.warmup_steps} steps, keys and values of the other ranks are {how}"

    def stages(self, mesh: Mesh, clock: StepClock) -> list[DisplacedStage]:
        """The attention stages this strategy adds to a plan."""
        return [DisplacedStage(mesh.axis("patch"), clock, self.warmup_steps, self.order)]


class _Slots:
    """Keys and values of all ranks for one layer and branch: those of the last steps, and room to receive the next.

    `held` has the newest last; `own` is where this rank's rows are. A buffer is reused only after the messages that
    read or fill it are done.
    """

    def __init__(self, like: Tensor, sizes: tuple[int, ...], own: slice, order: int) -> None:
        batch, heads, _, dim = like.shape
        self.sizes, self.own, self._keep = sizes, own, order + 1
        self.held: list[Tensor] = []
        self._free = [like.new_empty((sum(sizes), batch, 2, heads, dim)) for _ in range(2 + order)]
        self._incoming: Tensor | None = None
        self._pending: Pending | None = None

    def gather(self, axis: Axis, call: AttentionCall) -> Tensor:
        """A synchronous step: everybody's fresh rows."""
        self.settle()
        whole = self._free.pop()
        write_keys_values(whole[self.own], call.k, call.v)
        all_gather(axis, whole, self.sizes, name="displaced patches, warm-up").wait()
        self._hold(whole)
        return whole

    def forecast(self, call: AttentionCall, ratio: float | None) -> Tensor:
        """Own fresh rows and a forecast of the others', which is the last step's where `ratio` is None."""
        self.settle()
        if ratio is None or len(self.held) < 2:
            whole = self.held[-1]
        else:
            # The older step is not needed any more: last + ratio * (last - older) is written over it.
            whole, last = self.held.pop(0), self.held[-1]
            for others in (slice(0, self.own.start), slice(self.own.stop, None)):
                whole[others].lerp_(last[others], 1.0 + ratio)
            self._free.append(whole)
        write_keys_values(whole[self.own], call.k, call.v)
        return whole

    def send(self, axis: Axis, whole: Tensor) -> None:
        """Sends own rows of this step and receives the others', to be read in the next."""
        spare = next(buffer for buffer in self._free if buffer is not whole)
        self._free = [buffer for buffer in self._free if buffer is not spare]
        self._incoming = spare
        recvs = spare.split(list(self.sizes))
        self._pending = all_to_all(axis, [whole[self.own]] * axis.size, recvs, name="displaced patches")

    def settle(self) -> None:
        """Waits for the messages of the last step."""
        if self._pending is not None and self._incoming is not None:
            self._pending.wait()
            self._hold(self._incoming)
            self._pending = self._incoming = None

    @property
    def under_way(self) -> bool:
        """Whether rows of the last step are still to be waited for."""
        return self._pending is not None

    def _hold(self, buffer: Tensor) -> None:
        self.held.append(buffer)
        if len(self.held) > self._keep:
            self._free.append(self.held.pop(0))


class DisplacedStage:
    """Attends to own fresh and others' forecast keys, and sends the fresh ones for the next step."""

    def __init__(self, axis: Axis, clock: StepClock, warmup_steps: int, order: int) -> None:
        self.axis, self.clock, self.warmup_steps, self.order = axis, clock, warmup_steps, order
        self._slots: dict[tuple[int, int, int], _Slots] = {}
        clock.on_begin(self.reset)

    def reset(self) -> None:
        """Waits for what is under way and forgets it."""
        for slots in self._slots.values():
            slots.settle()
        self._slots.clear()

    def abandon(self) -> None:
        """Forgets what is under way without waiting, after an error."""
        self._slots.clear()

    def run(self, call: AttentionCall, inner: Any) -> Tensor:
        """Attention of the local queries to all slots; `inner` computes it."""
        key, sizes = (call.layer, call.wave, self.clock.branch), call.sizes
        slots = self._slots.get(key)
        if slots is None:
            start = offsets(sizes)[self.axis.index]
            own = slice(start, start + sizes[self.axis.index])
            slots = self._slots[key] = _Slots(call.k, sizes, own, self.order)
        assert slots.sizes == sizes, "the token count changed within a generation"
        if self.clock.step < self.warmup_steps or not (slots.held or slots.under_way):
            whole = slots.gather(self.axis, call)
        else:
            whole = slots.forecast(call, self.clock.step_ratio if self.order else None)
            if not self.clock.is_last_step:
                slots.send(self.axis, whole)
        k, v = unpack_keys_values(whole)
        return inner(AttentionCall(call.layer, call.q, k, v, (sum(sizes),), 0, call.masks, call.scale))

    def predict(self, shape: AttentionShape) -> tuple[int, AttentionShape]:
        """Bytes this rank sends in a step: its keys and values to every other rank (the last ones have no reader)."""
        if shape.is_last and shape.step >= self.warmup_steps:
            return 0, shape
        unit = shape.batch * 2 * shape.kv_heads * shape.head_dim * shape.itemsize
        return shape.sizes[shape.index] * unit * (self.axis.size - 1), shape
