"""Keeps keys and values for the next step, in buffers that are filled while the rank computes."""

from __future__ import annotations

from torch import Tensor

from partsong.parallel.attention_call import AttentionCall, Runs
from partsong.parallel.exchange.key_blocks import write_keys_values
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import Pending, all_gather, exchange
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets

__all__ = ["Slots"]


class Slots:
    """Holds keys and values of the last steps for one layer and branch, and room to receive the next.

    A buffer is reused only after the messages that read or fill it are done. Steps after the warm-up allocate none.

    Args:
        axis: the ranks.
        runs: the token runs of every shard.
        like: a block `[L, B, 2, H, D]` of any length.
        order: steps to look back on before the last.

    Attributes:
        held: the rows of the last steps, newest last.
        steps: the step of each of `held`.
        own: the slice of this rank's rows in a buffer.
    """

    def __init__(self, axis: Axis, runs: tuple[Runs, ...], like: Tensor, order: int) -> None:
        self.axis, self.runs, self.order = axis, runs, order
        self.held: list[Tensor] = []
        self.steps: list[int] = []
        self.sizes = tuple(sum(length for _, length in shard) for shard in runs)
        start = offsets(self.sizes)[axis.index]
        self.own = slice(start, start + self.sizes[axis.index])
        self.free = [like.new_empty((sum(self.sizes), *like.shape[1:])) for _ in range(2 + order)]
        self._incoming: tuple[int, Tensor] | None = None
        self._pending: Pending | None = None

    def gather(self, call: AttentionCall, step: int) -> Tensor:
        """Gathers the fresh rows of all ranks, in a step that waits for them."""
        self.settle()
        whole = self.free.pop()
        write_keys_values(whole[self.own], call.k, call.v)
        all_gather(self.axis, whole, self.sizes, name="displaced patches, warm-up").wait()
        self._hold(step, whole)
        return whole

    def forecast(self, call: AttentionCall, clock: StepClock) -> Tensor:
        """Returns own fresh rows and a forecast of the others'; the last values where only one step is known."""
        self.settle()
        ratio = clock.reach(*self.steps) if len(self.held) == 2 else None
        if ratio is None:
            rows = self.held[-1]
        else:
            # The older step is no longer needed: last + ratio * (last - older) is written over it.
            rows, last = self.held.pop(0), self.held[-1]
            self.steps.pop(0)
            for others in (slice(0, self.own.start), slice(self.own.stop, None)):
                rows[others].lerp_(last[others], 1.0 + ratio)
            self.free.append(rows)
        write_keys_values(rows[self.own], call.k, call.v)
        return rows

    def send(self, rows: Tensor, step: int) -> None:
        """Sends this rank's rows to all others, and receives theirs to read in the next step."""
        spare = next(buffer for buffer in self.free if buffer is not rows)
        self.free = [buffer for buffer in self.free if buffer is not spare]
        self._incoming = step, spare
        places = spare.split(list(self.sizes))
        peers = [peer for peer in range(self.axis.size) if peer != self.axis.index]
        sends, recvs = dict.fromkeys(peers, rows[self.own]), {peer: places[peer] for peer in peers}
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

    def _hold(self, step: int, rows: Tensor) -> None:
        self.held.append(rows)
        self.steps.append(step)
        if len(self.held) > 1 + self.order:
            self.free.append(self.held.pop(0))
            self.steps.pop(0)
