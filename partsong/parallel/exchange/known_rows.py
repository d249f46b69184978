"""Keeps the two last known values of keys and values, row by row, and guesses those of later steps from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.parallel.exchange.wires import Wire, message_room
from partsong.parallel.hooks.clock import StepClock

__all__ = ["KnownRows", "Part", "Stretch"]

#: Share of the last change by which rows are extrapolated where that is uncertain: when they are older than a step, and
#: for the base of a residual. A line over several steps is uncertain, and one through rounded values more so.
TREND = 0.5


@dataclass(slots=True)
class Stretch:
    """Describes a run of rows that are always refreshed together.

    Attributes:
        rows: its slice of a buffer.
        steps: the steps of its older and its last known values; equal where only one is known.
    """

    rows: slice
    steps: tuple[int, int]

    @property
    def length(self) -> int:
        """Returns the number of rows."""
        return self.rows.stop - self.rows.start

    def ratio(self, clock: StepClock, step: int) -> float:
        """Returns the time from the last known values to a step, over that from the older values to the last."""
        older, last = self.steps
        if older == last or last == step:
            return 0.0
        known = clock.reach(older, last, step)  # unknown without times: steps are then assumed to be even
        return min((step - last) / (last - older), clock.MAX_RATIO) if known is None else known


#: A stretch of a message, and how far its known values are extrapolated as the base of a residual.
Part = tuple[Stretch, float]


class KnownRows:
    """Holds the last known values of rows and, if needed, older ones.

    Args:
        last: the last known values `[L, B, 2, H, D]`.
        older: room for older ones; None keeps none, and then nothing is extrapolated.
        wire: how rows are written into messages; None sends them as they are.
    """

    def __init__(self, last: Tensor, older: Tensor | None, wire: Wire | None) -> None:
        self.last, self.older, self.wire = last, older, wire
        self._sent: Tensor | None = None

    def carried(self, stretch: Stretch, ratio: float) -> Tensor:
        """Returns the last known values of a stretch, extrapolated by a share of their last change."""
        last = self.last[stretch.rows]
        if self.older is None or ratio == 0.0:
            return last
        return torch.lerp(self.older[stretch.rows], last, 1.0 + TREND * ratio)

    def encode(self, values: Sequence[Tensor], parts: Sequence[Part]) -> Tensor:
        """Encodes rows of some stretches as a message of the wire."""
        assert self.wire is not None
        if self.wire.is_residual:
            values = [rows - self.carried(*part) for rows, part in zip(values, parts, strict=True)]
        self._sent = self.wire.encode(values[0] if len(values) == 1 else torch.cat(list(values)), self._sent)
        return self._sent

    def room(self, rows: int) -> Tensor:
        """Allocates a message for a number of rows."""
        shape = (rows, *self.last.shape[1:])
        if self.wire is None:
            return self.last.new_empty(shape)
        return message_room(self.wire, shape, self.last.device)

    def take(self, message: Tensor, parts: Sequence[Part], step: int) -> None:
        """Replaces known rows by those of a message for some step."""
        sizes = [stretch.length for stretch, _ in parts]
        if self.wire is not None:
            message = self.wire.decode(message, (sum(sizes), *self.last.shape[1:])).to(self.last.dtype)
        for (stretch, ratio), values in zip(parts, message.split(sizes), strict=True):
            if self.wire is not None and self.wire.is_residual:
                values = self.carried(stretch, ratio) + values
            self.put(stretch, values, step)

    def put(self, stretch: Stretch, values: Tensor, step: int) -> None:
        """Replaces known rows by values for some step."""
        if self.older is not None:
            self.older[stretch.rows] = self.last[stretch.rows]
        self.last[stretch.rows] = values
        stretch.steps = stretch.steps[-1], step
