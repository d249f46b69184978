"""Computes the AUP score: how much accuracy a decoder keeps while it writes more tokens per forward.

It is the area under the curve of accuracy over tokens per forward. A point counts less the further it is below the best
accuracy known for the task, and a point that lost too much does not count at all. The score has no upper limit, so it
only compares decoders on one task with the same `best`. Source: d3LLM's leaderboard ("Accuracy Under Parallelism").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from partsong.errors import ArgumentError
from partsong.knobs import Number, check_knobs, type_hints

__all__ = ["CUT", "PENALTY", "aup", "aup_board", "aup_weight"]

#: A point this many percentage points below the least parallel one is left out.
CUT = 5.0
#: Rate at which the weight falls with the relative loss of accuracy.
PENALTY = 3.0

#: Tokens per forward and accuracy in percent.
Point = tuple[float, float]
Best = Annotated[float, Number(0.0, 100.0, above=True)]
Penalty = Annotated[float, Number(0.0)]


def aup_weight(accuracy: Annotated[float, Number(0.0, 100.0)], best: Best, *, penalty: Penalty = PENALTY) -> float:
    """Returns the weight of a point, ``exp(-penalty * (1 - accuracy / best))`` below `best` and 1 from there on.

    Args:
        accuracy: of the point, in percent.
        best: the highest accuracy on the task, in percent.
        penalty: how fast the weight falls; at 0 all points count the same.

    Returns:
        A number from 0 to 1.

    Raises:
        ArgumentError: a number is out of range.

    >>> aup_weight(80.0, 80.0)
    1.0
    """
    check_knobs(type_hints(aup_weight), {"accuracy": accuracy, "best": best, "penalty": penalty})
    return min(math.exp(-penalty * (1.0 - accuracy / best)), 1.0)


def aup(
    points: Iterable[Point],
    *,
    best: Best | None = None,
    penalty: Penalty = PENALTY,
    cut: Annotated[float, Number(0.0)] = CUT,
) -> float:
    """Computes the accuracy under parallelism of one decoder on one task.

    With points (rho, y) in the order of rho, without those whose y is more than `cut` below the first one's::

        rho_1 y_1 + sum over i > 1 of (rho_i - rho_(i-1)) (y_i W(y_i) + y_(i-1) W(y_(i-1))) / 2

    Args:
        points: tokens per forward (above 0) and accuracy in percent, in any order.
        best: the highest accuracy, in percent, of all decoders compared on this task; None is the highest of these
            points. W is the weight relative to it.
        penalty: how fast W falls; see `aup_weight`.
        cut: in percentage points.

    Returns:
        The score, in percent times tokens per forward.

    Raises:
        ArgumentError: there are no points, or a number is out of range.

    >>> aup([(1.0, 80.0), (3.0, 80.0)])
    240.0
    """
    check_knobs(type_hints(aup), {"best": best, "penalty": penalty, "cut": cut})
    curve = _sorted_points(points)
    if best is None:
        best = max(y for _, y in curve) or 100.0  # if every accuracy is 0, the weights do not matter
    kept = [(rho, y) for rho, y in curve if y >= curve[0][1] - cut]
    area = kept[0][0] * kept[0][1]
    heights = [y * aup_weight(y, best, penalty=penalty) for _, y in kept]
    for index in range(1, len(kept)):
        area += (kept[index][0] - kept[index - 1][0]) * (heights[index] + heights[index - 1]) / 2
    return area


def aup_board(curves: Mapping[str, Sequence[Point]], *, best: float | None = None) -> dict[str, float]:
    """Scores several decoders on one task, relative to the best accuracy that any of them reached.

    Args:
        curves: for each decoder by name, its points as `aup` takes them.
        best: as in `aup`; None is the highest of all points.

    Returns:
        Scores by name, in the order of `curves`.

    Raises:
        ArgumentError: there are no decoders, one has no points, or a number is out of range.

    >>> aup_board({"one": [(1.0, 50.0)], "two": [(1.0, 50.0), (2.0, 50.0)]})
    {'one': 50.0, 'two': 100.0}
    """
    if not curves:
        raise ArgumentError("a board needs at least one decoder's points")
    reached = max(y for points in curves.values() for _, y in _sorted_points(points)) or None
    best = reached if best is None else best
    return {name: aup(points, best=best) for name, points in curves.items()}


def _sorted_points(points: Iterable[Point]) -> list[Point]:
    curve = sorted((float(rho), float(y)) for rho, y in points)
    if not curve:
        raise ArgumentError("AUP needs at least one point of tokens per forward and accuracy, found none")
    for rho, y in curve:
        if not 0.0 < rho < math.inf or not 0.0 <= y <= 100.0:
            raise ArgumentError(
                f"a point is tokens per forward above 0 and accuracy in percent, 0 to 100; found ({rho!r}, {y!r})"
            )
    return curve
