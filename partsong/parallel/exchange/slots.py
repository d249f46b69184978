"""Keeps keys and values for the next step, in buffers that are filled while the rank computes."""

from __future__ import annotations

import torch
from torch import Tensor

from partsong.parallel.attention_call import AttentionCall, Runs
from partsong.parallel.exchange.key_blocks import empty_block, write_keys_values
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import Pending, all_gather, exchange
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets

__all__ = ["Slots"]


class Slots:
    """Holds keys and values of earlier steps for one layer and branch: as few buffers as a forecast takes.

    A buffer has the rows of all ranks. What is read in a step is put together in memory that the step gives back, so
    messages for the next step may fill the buffer that was read.

    With `ahead`, ranks send their rows as they will be in the next step, along the line through their last two. So only
    the rank itself has to know the older ones, and one buffer is enough. Else ranks send their rows as they are, and
    whoever reads them keeps a buffer for each step that the forecast looks back on.

    Args:
        axis: the ranks.
        runs: the token runs of every shard.
        clock: where the generation stands.
        order: steps to look back on before the last.
        ahead: whether rows are sent as they will be, which takes a clock that knows the next step's time.

    Attributes:
        held: the rows of the last steps, newest last; with `ahead` those of the next step, once past the warm-up.
        steps: the step of each of `held`.
        own: the slice of this rank's rows in a buffer.
        before: this rank's rows in the last step; None before the first.
    """

    def __init__(self, axis: Axis, runs: tuple[Runs, ...], clock: StepClock, order: int, *, ahead: bool) -> None:
        self.axis, self.runs, self.clock, self.order, self.ahead = axis, runs, clock, order, ahead
        self.held: list[Tensor] = []
        self.steps: list[int] = []
        self.before: Tensor | None = None
        self.sizes = tuple(sum(length for _, length in shard) for shard in runs)
        start = offsets(self.sizes)[axis.index]
        self.own = slice(start, start + self.sizes[axis.index])
        self._looks_back = order > 0 and not ahead
        self._last_step = -1
        self._incoming: tuple[int, Tensor] | None = None
        self._pending: Pending | None = None

    def gather(self, call: AttentionCall, warmup_steps: int) -> Tensor:
        """Gathers the fresh rows of all ranks, in a step that waits for them."""
        self.settle()
        whole, step = empty_block(call.k, sum(self.sizes)), self.clock.step
        write_keys_values(whole[self.own], call.k, call.v)
        all_gather(self.axis, whole, self.sizes, name="displaced patches, warm-up").wait()
        ratio = self._ratio() if self.ahead and step >= warmup_steps - 1 else None
        if ratio is None:
            self._hold(step, whole)
        else:  # as if the others had sent a forecast
            self.held[-1].lerp_(whole, 1.0 + ratio)
        self._remember(whole[self.own])
        return whole

    def forecast(self, call: AttentionCall) -> Tensor:
        """Returns own fresh rows and a forecast of the others'; the last values where only one step is known."""
        self.settle()
        rows, last = torch.empty_like(self.held[-1]), self.held[-1]
        ratio = self.clock.reach(*self.steps) if len(self.held) == 2 else None
        for others in (slice(0, self.own.start), slice(self.own.stop, None)):
            if ratio is None:
                rows[others] = last[others]
            else:
                torch.lerp(self.held[0][others], last[others], 1.0 + ratio, out=rows[others])
        write_keys_values(rows[self.own], call.k, call.v)
        return rows

    def send(self, rows: Tensor) -> None:
        """Sends this rank's rows to all others, and receives theirs to read in the next step."""
        is_full = len(self.held) > self._looks_back
        spare = self.held.pop(0) if is_full else torch.empty_like(rows)
        self.steps = self.steps[is_full:]
        fresh, ratio = rows[self.own], self._ratio() if self.ahead else None
        if ratio is None or self.before is None:
            spare[self.own] = fresh
        else:
            torch.lerp(self.before, fresh, 1.0 + ratio, out=spare[self.own])
        self._remember(fresh)
        self._incoming = self.clock.step, spare
        places = spare.split(list(self.sizes))
        peers = [peer for peer in range(self.axis.size) if peer != self.axis.index]
        sends, recvs = dict.fromkeys(peers, spare[self.own]), {peer: places[peer] for peer in peers}
        self._pending = exchange(self.axis, sends, recvs, name="displaced patches")

    def settle(self) -> None:
        """Waits for the messages of the last step."""
        if self._pending is not None and self._incoming is not None:
            self._pending.wait()
            self._hold(*self._incoming)
            self._pending = self._incoming = None

    @property
    def is_empty(self) -> bool:
        """Says whether there is nothing old to read, even after waiting."""
        return not self.held and self._pending is None

    @property
    def nbytes(self) -> int:
        """Returns the bytes of what is kept from one step to the next."""
        incoming = [] if self._incoming is None else [self._incoming[1]]
        return sum(kept.nbytes for kept in (*self.held, *incoming, self.before) if kept is not None)

    def _ratio(self) -> float | None:
        """Returns how far this rank's last two steps are carried on to reach the next; None where one is unknown."""
        if self.before is None or not self.order:
            return None
        return self.clock.reach(self._last_step, self.clock.step, self.clock.step + 1)

    def _remember(self, own: Tensor) -> None:
        if not self.order or not self.ahead:
            return
        self.before = own.clone() if self.before is None else self.before.copy_(own)
        self._last_step = self.clock.step

    def _hold(self, step: int, rows: Tensor) -> None:
        self.held, self.steps = [*self.held, rows], [*self.steps, step]
        if len(self.held) > 1 + self._looks_back:
            del self.held[0], self.steps[0]
