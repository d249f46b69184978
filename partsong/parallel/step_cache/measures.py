"""Estimates, sample by sample, how far off a forecast would be if blocks were left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from partsong.parallel.ranks.later import agree_later, on_device
from partsong.parallel.ranks.mesh import Axis

__all__ = [
    "Compare",
    "DecideName",
    "FirstBlockChange",
    "InputChange",
    "MagnitudeDrift",
    "Measure",
    "MeasureName",
    "compared",
]

MeasureName = Literal["first_block", "input", "magnitude", "spectral"]
DecideName = Literal["now", "late"]

#: Begins to measure the relative change of every sample between two tensors `[B, ...]`, and returns a function for
#: the result, which is the same on all ranks.
Compare = Callable[[Tensor, Tensor], Callable[[], list[float]]]


class Measure(Protocol):
    """Describes one measure of one guidance branch; it remembers what it saw in earlier steps."""

    def taken(self, seen: Tensor) -> Tensor:
        """Returns what the other methods take for a tensor that the model computed; all ranks call it alike."""
        return seen

    def errors(self, seen: Tensor | None, step: int) -> list[float]:
        """Returns an estimate for every sample, in a step in which blocks may be left out.

        Args:
            seen: the tensor that the measure compares, `[B, ...]`; None if it needs none.
            step: number of the step.
        """
        ...

    def look_ahead(self, seen: Tensor | None) -> None:
        """Begins the measurement for the next step, where steps do not decide by their own."""

    def settle(self, seen: Tensor | None, computed: Sequence[bool]) -> None:
        """Notes for which samples the blocks are computed in this step."""
        ...

    def close(self) -> None:
        """Waits for pending messages that will not be read."""


class FirstBlockChange(Measure):
    """Compares what the first block adds with what it added in the last computed step.

    Args:
        compare: compares two tensors.

    Source: the first-block form of residual caches, ParaAttention's.
    """

    def __init__(self, compare: Compare) -> None:
        self._compare = compare
        self._last: Tensor | None = None

    def errors(self, seen: Tensor | None, step: int) -> list[float]:
        """Returns the relative change of what the first block adds."""
        assert seen is not None and self._last is not None
        return self._compare(seen, self._last)()

    def settle(self, seen: Tensor | None, computed: Sequence[bool]) -> None:
        """Remembers what the first block added where all blocks are computed."""
        assert seen is not None
        if self._last is None or all(computed):
            self._last = seen
        elif any(computed):
            chosen = on_device(computed, seen.device).view(-1, *[1] * (seen.ndim - 1))
            self._last = torch.where(chosen, seen, self._last)


class InputChange(Measure):
    """Sums estimated changes of the output, from changes of the first block's modulated input.

    Args:
        compare: compares two tensors.
        output_change: turns a relative change of the input into one of the output.
        taken: makes what is compared of the input; None compares the input itself.

    Source: TeaCache, arXiv 2411.19108; a polynomial below 0 counts as 0 here.
    """

    def __init__(
        self, compare: Compare, output_change: Callable[[float], float], taken: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._compare, self._output_change, self._taken = compare, output_change, taken
        self._last: Tensor | None = None
        self._sums: list[float] = []

    def taken(self, seen: Tensor) -> Tensor:
        """Returns what is compared."""
        return seen if self._taken is None else self._taken(seen)

    def errors(self, seen: Tensor | None, step: int) -> list[float]:
        """Returns the sum of the changes since the last computed step."""
        assert seen is not None and self._last is not None
        changes = map(self._output_change, self._compare(seen, self._last)())
        self._sums = [total + change for total, change in zip(self._sums, changes, strict=True)]
        return self._sums

    def settle(self, seen: Tensor | None, computed: Sequence[bool]) -> None:
        """Remembers this step's input, and begins anew where all blocks are computed."""
        self._last = seen
        sums = self._sums or [0.0] * len(computed)
        self._sums = [0.0 if done else total for total, done in zip(sums, computed, strict=True)]


class MagnitudeDrift(Measure):
    """Sums the calibrated drift in size of what all blocks add since the last computed step.

    Args:
        ratio_of: returns the calibrated ratio of a step.
        samples: number of samples, which all get the same estimate.

    Source: MagCache, arXiv 2506.09045.
    """

    def __init__(self, ratio_of: Callable[[int], float], samples: int) -> None:
        self._ratio_of = ratio_of
        self._products, self._sums = [1.0] * samples, [0.0] * samples

    def errors(self, seen: Tensor | None, step: int) -> list[float]:
        """Returns the sum of the drifts of the steps since the last computed one."""
        self._products = [product * self._ratio_of(step) for product in self._products]
        self._sums = [total + abs(1.0 - product) for total, product in zip(self._sums, self._products, strict=True)]
        return self._sums

    def settle(self, seen: Tensor | None, computed: Sequence[bool]) -> None:
        """Begins anew where all blocks are computed."""
        self._products = [1.0 if done else product for product, done in zip(self._products, computed, strict=True)]
        self._sums = [0.0 if done else total for total, done in zip(self._sums, computed, strict=True)]


def compared(now: Tensor, before: Tensor, samples: int, ranks: Axis) -> Callable[[], list[float]]:
    """Compares the sum of absolute differences with the sum of absolute values, for every sample and over all ranks.

    Args:
        now: `[B, ...]`.
        before: the same in an earlier step.
        samples: B, or 1 to treat the batch as one sample.
        ranks: those that hold parts of these samples; all of them call it.

    Returns:
        A function that returns the first sums over the second, and waits for them if needed.
    """
    sums = ((now - before).abs(), before.abs())
    own = torch.cat([each.reshape(samples, -1).sum(dim=1, dtype=torch.float64) for each in sums])
    later = agree_later(ranks, own, name="whether to leave blocks out")

    def read() -> list[float]:
        totals = [sum(column) for column in zip(*later.read(), strict=True)]
        pairs = zip(totals[:samples], totals[samples:], strict=True)
        return [change / size if size else float(change > 0) for change, size in pairs]

    return read
