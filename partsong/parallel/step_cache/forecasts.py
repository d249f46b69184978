"""Forecasts what blocks add in a step from what they added in earlier ones, over the noise level."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

__all__ = ["FORECASTS", "Added", "Forecast", "ForecastName", "History", "foca", "interpolated", "polynomial_weights"]

ForecastName = Literal["hold", "linear", "quadratic", "foca"]

#: What each list of blocks adds to each of the values that pass through it; None where a list returns no such value.
Added = list[tuple[Any, ...]]


@dataclass(slots=True)
class History:
    """Remembers what blocks added, each with the noise level of its step; the newest stands last.

    Attributes:
        full: of the last steps that were computed in full.
        recent: of the last two steps of any kind. Only FoCa fills it.
    """

    full: list[tuple[float, Added]] = field(default_factory=list)
    recent: list[tuple[float, Added]] = field(default_factory=list)


def polynomial_weights(levels: Sequence[float], level: float) -> list[float]:
    """Weighs values at some noise levels, so that their sum is their interpolating polynomial at another level.

    Args:
        levels: where the values are known, no two alike, in any distances.
        level: where the polynomial is asked for.

    Returns:
        One weight for each level. They add up to 1.

    Example:
        >>> polynomial_weights([1.0, 0.5], 0.25)
        [-0.5, 1.5]
    """
    return [
        math.prod((level - other) / (own - other) for j, other in enumerate(levels) if j != i)
        for i, own in enumerate(levels)
    ]


def interpolated(history: History, level: float, order: int) -> Added:
    """Evaluates the polynomial through the last `order` + 1 full steps, of a lower degree where there are fewer.

    Args:
        history: holds at least one full step.
        level: noise level of the step that is left out.
        order: degree of the polynomial: 0 holds the last value.
    """
    known = _distinct(history.full)[-order - 1 :]
    weights = polynomial_weights([at for at, _ in known], level)
    return _weighted_sum(weights, [added for _, added in known])


def foca(history: History, level: float) -> Added:
    """Forecasts by Heun's rule: with the mean of the slope of the last two full steps and that of the last two values.

    The last two values are those of the last two steps, forecast or not. On even intervals this is
    A + e/2 ((A - A') + (F - F')), with A the full steps, F the last values and e the intervals since A. Here slopes are
    taken over the noise level, so a straight line is continued exactly over uneven intervals too.

    Args:
        history: holds at least one full step; with only one, that is held.
        level: noise level of the step that is left out.

    Source: FoCa, arXiv 2508.16211.
    """
    full, recent = _distinct(history.full)[-2:], _distinct(history.recent)[-2:]
    if len(full) < 2 or len(recent) < 2:
        return full[-1][1]
    half = (level - full[-1][0]) / 2
    weights, values = [1.0], [full[-1][1]]
    for (old_at, old), (new_at, new) in (full, recent):
        weights += [half / (new_at - old_at), -half / (new_at - old_at)]
        values += [new, old]
    return _weighted_sum(weights, values)


def _distinct(known: Sequence[tuple[float, Added]]) -> list[tuple[float, Added]]:
    """Drops values that a later one at the same noise level replaces: Heun's scheduler comes to a level twice."""
    return [entry for i, entry in enumerate(known) if all(entry[0] != later[0] for later in known[i + 1 :])]


def _weighted_sum(weights: Sequence[float], values: Sequence[Added]) -> Added:
    """Adds up weighted values; a single one of weight 1 is returned as it is."""
    if len(values) == 1:
        return values[0]
    return [
        tuple(None if parts[0] is None else _weighted(weights, parts) for parts in zip(*lists, strict=True))
        for lists in zip(*values, strict=True)
    ]


def _weighted(weights: Sequence[float], parts: Sequence[Any]) -> Any:
    total = parts[0] * weights[0]
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        total = total.add(part, alpha=weight)
    return total


@dataclass(frozen=True, slots=True)
class Forecast:
    """Describes a way to forecast.

    Attributes:
        run: computes it from what is remembered, at a noise level.
        num_full: full steps to remember.
        num_recent: steps of any kind to remember.
    """

    run: Callable[[History, float], Added]
    num_full: int
    num_recent: int = 0


def _interpolating(order: int) -> Forecast:
    # One more than it takes, since a scheduler may come to a noise level twice.
    return Forecast(lambda history, level: interpolated(history, level, order), order + 1 + (order > 0))


FORECASTS: Mapping[str, Forecast] = MappingProxyType(
    {
        "hold": _interpolating(0),
        "linear": _interpolating(1),
        "quadratic": _interpolating(2),
        "foca": Forecast(foca, 3, 3),
    }
)
