"""Remembers what lists of blocks added in earlier steps, sample by sample, and forecasts what they add."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from partsong.parallel.ranks.later import on_device
from partsong.parallel.step_cache.forecasts import ORDERS, ForecastName, foca_weights, forecast_weights, weighted

__all__ = ["Added", "Forecaster", "History", "chosen"]

#: What each list of blocks adds to each of the values that pass through it; None where a list returns no such value.
Added = list[tuple[Tensor | None, ...]]


class History:
    """Keeps what blocks added in the last steps of every sample, newest first, no two of them at one noise level.

    Args:
        depth: how many steps.
        samples: how many samples have steps of their own.
        level_of: returns the noise level of a step.

    Attributes:
        values: what was added in each of these steps.
        steps: for each sample, the numbers of its steps.
    """

    def __init__(self, depth: int, samples: int, level_of: Callable[[int], float]) -> None:
        self.depth, self.samples, self.level_of = depth, samples, level_of
        self.values: list[Added] = []
        self.steps: list[list[int]] = [[] for _ in range(samples)]

    def push(self, values: Added, step: int, rows: Sequence[int] | None = None) -> None:
        """Adds the values of a step; replaces those of a sample at the same noise level.

        Args:
            values: what was added, for the samples in `rows`.
            step: number of the step.
            rows: which samples; None takes all.
        """
        taken = list(range(self.samples) if rows is None else rows)
        new = [row for row in taken if not self.steps[row] or self.level_of(self.steps[row][0]) != self.level_of(step)]
        if rows is None and len(new) == self.samples:
            self.values = [values, *self.values[: self.depth - 1]]
        elif rows is None and not new:
            self.values[0] = values
        else:
            self._write(values, taken, new)
        for row in taken:
            kept = self.steps[row][: self.depth - 1] if row in new else self.steps[row][1:]
            self.steps[row] = [step, *kept]

    def levels(self) -> list[list[float]]:
        """Lists for each sample the noise levels of its steps."""
        # Levels are final only when their steps have ended, so steps are kept instead of levels.
        return [[self.level_of(step) for step in steps] for steps in self.steps]

    def _write(self, values: Added, rows: list[int], new: list[int]) -> None:
        """Writes the values of some samples, after moving their earlier ones one step back."""
        if new and len(self.values) < self.depth:
            self.values.append(self.values[-1])
        if new:
            pairs = zip(self.values[1:], self.values[:-1], strict=True)
            older = [_replaced(old, [chosen(each, new) for each in newer], new) for old, newer in pairs]
            self.values = [self.values[0], *older]
        self.values[0] = _replaced(self.values[0], values, rows)


class Forecaster:
    """Forecasts what lists of blocks add, from what they added in steps that were computed in full.

    Args:
        forecast: kind of forecast.
        samples: how many samples have steps of their own.
        level_of: returns the noise level of a step.
    """

    def __init__(self, forecast: ForecastName, samples: int, level_of: Callable[[int], float]) -> None:
        self.forecast: ForecastName = forecast
        self.level_of = level_of
        self._full = History(1 + ORDERS.get(forecast, 1), samples, level_of)
        # Computed or forecast values, which only FoCa reads.
        self._recent = History(2, samples, level_of) if forecast == "foca" else None

    @property
    def is_ready(self) -> bool:
        """Says whether a step was computed."""
        return bool(self._full.values)

    def note(self, values: Added, step: int, rows: Sequence[int] | None = None) -> None:
        """Notes what was computed in a step, for all samples or those in `rows`."""
        for history in filter(None, (self._full, self._recent)):
            history.push(values, step, rows)

    def at(self, step: int) -> Added:
        """Returns what every list of blocks is forecast to add in a step."""
        level = self.level_of(step)
        if self._recent is None:
            weights = [forecast_weights(self.forecast, levels, level) for levels in self._full.levels()]
            return _sums(self._full.values, [_padded(row, len(self._full.values)) for row in weights])
        pairs = zip(self._full.levels(), self._recent.levels(), strict=True)
        weights = [self._foca(full, recent, level) for full, recent in pairs]
        values = _sums([*self._full.values, *self._recent.values], weights)
        self._recent.push(values, step)
        return values

    def _foca(self, full: list[float], recent: list[float], level: float) -> list[float]:
        assert self._recent is not None
        own, others = ([1.0], []) if min(len(full), len(recent)) < 2 else foca_weights(full, recent, level)
        return _padded(own, len(self._full.values)) + _padded(others, len(self._recent.values))


def _padded(weights: list[float], length: int) -> list[float]:
    """Gives no weight to steps that a sample does not have yet."""
    return weights + [0.0] * (length - len(weights))


def chosen(values: tuple[Tensor | None, ...], rows: list[int]) -> tuple[Tensor | None, ...]:
    """Returns some samples of what a list of blocks adds."""
    return tuple(None if each is None else each.index_select(0, on_device(rows, each.device)) for each in values)


def _replaced(values: Added, by: Added, rows: list[int]) -> Added:
    """Returns values with those of some samples replaced; the tensors themselves may be in use elsewhere."""

    def one(value: Tensor | None, part: Tensor | None) -> Tensor | None:
        if value is None or part is None:
            return None
        return value.index_copy(0, on_device(rows, value.device), part)

    return [tuple(map(one, *of_list)) for of_list in zip(values, by, strict=True)]


def _sums(steps: Sequence[Added], weights: Sequence[Sequence[float]]) -> Added:
    """Adds up the steps of every list of blocks, with weights for each sample."""
    return [
        tuple(None if parts[0] is None else weighted(parts, weights) for parts in zip(*of_list, strict=True))
        for of_list in zip(*steps, strict=True)
    ]
