"""Forecasts a tensor at a noise level from its values at earlier levels with any spacing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from partsong.parallel.ranks.later import on_device

__all__ = ["ORDERS", "ForecastName", "foca_weights", "forecast_weights", "polynomial_weights", "weighted"]

ForecastName = Literal["hold", "half", "linear", "quadratic", "foca"]

#: Degree of the polynomial of each forecast.
ORDERS = {"hold": 0, "half": 1, "linear": 1, "quadratic": 2}


def forecast_weights(forecast: ForecastName, levels: Sequence[float], level: float) -> list[float]:
    """Returns the weights of the last full steps' values, newest first, in a forecast by one polynomial.

    "half" goes half as far as "linear": it is the mean of that and "hold".

    Example:
        >>> forecast_weights("half", [2.0, 3.0], 1.0), forecast_weights("half", [3.0], 1.0)
        ([1.5, -0.5], [1.0])
    """
    weights = polynomial_weights(levels[: 1 + ORDERS[forecast]], level)
    if forecast != "half":
        return weights
    first, *others = weights
    return [(1.0 + first) / 2, *(other / 2 for other in others)]


def polynomial_weights(levels: Sequence[float], level: float) -> list[float]:
    """Returns weights of values at some noise levels whose sum is their interpolating polynomial at another level.

    This is Newton's polynomial of divided differences, written as a sum of the values.

    Args:
        levels: where the values are known, all different, with any spacing.
        level: where the polynomial is evaluated.

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


def foca_weights(full: Sequence[float], recent: Sequence[float], level: float) -> tuple[list[float], list[float]]:
    """Returns weights of the last two full steps and the last two values by Heun's rule, the mean of two slopes.

    The last two values are those of the last two steps, forecast or not. On even intervals this is
    A + e/2 ((A - A') + (F - F')), with A the full steps, F the last values and e the intervals since A. Here slopes are
    taken over the noise level, so a straight line is continued exactly over uneven intervals too.

    Args:
        full: noise levels of the last two full steps, newest first.
        recent: noise levels of the last two values, newest first.
        level: noise level of the step that is left out.

    Returns:
        Weights of the full steps and of the last values.

    Source: FoCa, arXiv 2508.16211.

    Example:
        >>> foca_weights([2.0, 4.0], [1.0, 2.0], 0.0)
        ([1.5, -0.5], [-1.0, 1.0])
    """
    half = (level - full[0]) / 2
    by_full, by_recent = half / (full[0] - full[1]), half / (recent[0] - recent[1])
    return [1.0 + by_full, 0.0 - by_full], [by_recent, 0.0 - by_recent]


def weighted(values: Sequence[Tensor], weights: Sequence[Sequence[float]]) -> Tensor:
    """Sums values, each sample with weights of its own.

    Args:
        values: tensors `[B, ...]` of one shape.
        weights: for each sample a weight of every value, or one row for all samples.

    Returns:
        The sum `[B, ...]` in the values' type, computed in single precision at least. A single value of weight 1 is
        returned as it is.
    """
    first = values[0]
    if all(row[0] == 1.0 and not any(row[1:]) for row in weights):
        return first
    precision = torch.promote_types(first.dtype, torch.float32)
    columns = on_device(weights, first.device, precision).T
    total = torch.zeros_like(first, dtype=precision)
    for value, column in zip(values, columns, strict=True):
        total.addcmul_(value, column.view(-1, *[1] * (first.ndim - 1)))
    return total.to(first.dtype)
