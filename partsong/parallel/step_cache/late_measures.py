"""Estimates from the previous step's measurement, so that no step waits for its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from partsong.parallel.step_cache.measures import Compare, FirstBlockChange, InputChange, Measure

__all__ = ["LateFirstBlockChange", "LateInputChange"]


class _Late(Measure):
    """Reads the measurement that the previous step began."""

    def __init__(self) -> None:
        self._begun: Callable[[], list[float]] | None = None

    def close(self) -> None:
        """Waits for the pending measurement and forgets it."""
        if self._begun is not None:
            self._begun()
            self._begun = None

    def _measured(self) -> list[float] | None:
        """Returns the previous step's measurement; None if there is none."""
        begun, self._begun = self._begun, None
        return None if begun is None else begun()


class LateFirstBlockChange(_Late, FirstBlockChange):
    """Assumes that the first block's addition keeps changing as fast as up to the previous step.

    A change measured over some steps is scaled to the number of steps from the last computed one to this one.

    Args:
        compare: compares two tensors.
        samples: number of samples.
    """

    def __init__(self, compare: Compare, samples: int) -> None:
        _Late.__init__(self)
        FirstBlockChange.__init__(self, compare)
        self._since, self._measured_over = [0] * samples, [0] * samples

    def errors(self, seen: Tensor | None, step: int) -> list[float]:
        """Returns the forecast change; infinite where the previous step measured none."""
        changes = self._measured()
        if changes is None:
            return [math.inf] * len(self._since)
        return [c / over * since for c, over, since in zip(changes, self._measured_over, self._since, strict=True)]

    def look_ahead(self, seen: Tensor | None) -> None:
        """Begins to compare the first block's addition with that in the last computed step."""
        if seen is not None and self._last is not None:
            self._begun, self._measured_over = self._compare(seen, self._last), list(self._since)

    def settle(self, seen: Tensor | None, computed: Sequence[bool]) -> None:
        """Remembers what the first block added where all blocks are computed."""
        FirstBlockChange.settle(self, seen, computed)
        self._since = [1 if done else since + 1 for done, since in zip(computed, self._since, strict=True)]


class LateInputChange(_Late, InputChange):
    """Sums the changes up to the previous step, and counts the last one again for this step.

    Args:
        compare: compares two tensors.
        output_change: turns a relative change of the input into one of the output.
        taken: makes what is compared of the input; None compares the input itself.
    """

    def __init__(
        self, compare: Compare, output_change: Callable[[float], float], taken: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        _Late.__init__(self)
        InputChange.__init__(self, compare, output_change, taken)
        self._restarts: list[bool] = []

    def errors(self, seen: Tensor | None, step: int) -> list[float]:
        """Returns the forecast sum of the changes; infinite where the previous step measured none."""
        measured = self._measured()
        if measured is None:
            return [math.inf] * len(self._restarts)
        changes = [self._output_change(change) for change in measured]
        # Changes are summed since the last computed step, so do not count the one that led to it.
        news = zip(self._sums, changes, self._restarts, strict=True)
        self._sums = [total if restarts else total + change for total, change, restarts in news]
        return [total + change for total, change in zip(self._sums, changes, strict=True)]

    def look_ahead(self, seen: Tensor | None) -> None:
        """Begins to compare this step's input with that of the previous step."""
        if seen is not None and self._last is not None:
            self._begun = self._compare(seen, self._last)

    def settle(self, seen: Tensor | None, computed: Sequence[bool]) -> None:
        """Remembers this step's input, and begins anew where all blocks are computed."""
        InputChange.settle(self, seen, computed)
        self._restarts = list(computed)
