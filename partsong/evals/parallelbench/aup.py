"""The AUP score: one number for how much accuracy a decoder keeps while it writes more tokens per forward.

It is the area under the curve of accuracy over tokens per forward, in which a point counts less the further it is below
the best accuracy known for the task, and points that lost too much do not count at all. Source: d3LLM's leaderboard
("Accuracy Under Parallelism"). Like any area it has no upper end: it compares decoders on one task, with one `best`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from partsong.errors import ArgumentError

__all__ = ["CUT", "PENALTY", "aup", "aup_board", "aup_weight"]

#: Percentage points below the least parallel point at which a point is left out.
CUT = 5.0
#: How fast the weight falls with the relative loss of accuracy.
PENALTY = 3.0

#: Tokens per forward, and accuracy in percent.
Point = tuple[float, float]


def aup_weight(accuracy: float, best: float, *, penalty: float = PENALTY) -> float:
    """What a point counts: ``exp(-penalty * (1 - accuracy / best))``, and 1 from `best` on.

    Args:
        accuracy: of the point, in percent.
        best: the highest accuracy on the task, in percent.
        penalty: 0 weighs nothing.

    Returns:
        A number from 0 to 1.

    Raises:
        ArgumentError: a number out of range.

    >>> aup_weight(80.0, 80.0)
    1.0
    """
    if not 0.0 < best <= 100.0:
        raise ArgumentError(f"best={best!r}; use the highest accuracy on the task, in percent, above 0 to 100")
    if not 0.0 <= accuracy <= 100.0:
        raise ArgumentError(f"an accuracy of {accuracy!r}; use percent, 0 to 100")
    if not 0.0 <= penalty < math.inf:
        raise ArgumentError(f"penalty={penalty!r}; use a finite number from 0")
    return min(math.exp(-penalty * (1.0 - accuracy / best)), 1.0)


def aup(points: Iterable[Point], *, best: float | None = None, penalty: float = PENALTY, cut: float = CUT) -> float:
    """Accuracy under parallelism of one decoder on one task.

    With points (rho, y) in the order of rho, those with y below the first one's less `cut` left out::

        rho_1 y_1 + sum over i > 1 of (rho_i - rho_(i-1)) (y_i W(y_i) + y_(i-1) W(y_(i-1))) / 2

    Args:
        points: tokens per forward (above 0) and accuracy in percent; in any order.
        best: what W measures accuracies against: the highest on this task of all decoders compared, in percent.
            Default: the highest of these points.
        penalty: how fast W falls, see `aup_weight`.
        cut: percentage points.

    Returns:
        The score, in percent times tokens per forward.

    Raises:
        ArgumentError: no points, or numbers out of range.

    >>> aup([(1.0, 80.0), (3.0, 80.0)])
    240.0
    """
    curve = _checked(points)
    if not cut >= 0.0:
        raise ArgumentError(f"cut={cut!r}; use percentage points from 0")
    if best is None:
        # Where every accuracy is 0 any weight will do.
        best = max(y for _, y in curve) or 100.0
    kept = [(rho, y) for rho, y in curve if y >= curve[0][1] - cut]
    area = kept[0][0] * kept[0][1]
    # The first is weighed even where it stands alone, which checks `best` and `penalty`.
    heights = [y * aup_weight(y, best, penalty=penalty) for _, y in kept]
    for index in range(1, len(kept)):
        area += (kept[index][0] - kept[index - 1][0]) * (heights[index] + heights[index - 1]) / 2
    return area


def aup_board(
    curves: Mapping[str, Sequence[Point]], *, best: float | None = None, penalty: float = PENALTY, cut: float = CUT
) -> dict[str, float]:
    """The scores of several decoders on one task, measured against the best accuracy any of them reached.

    Args:
        curves: points by the decoder's name, as `aup` takes them.
        best: as in `aup`. Default: the highest of all points.
        penalty: as in `aup`.
        cut: as in `aup`.

    Returns:
        Scores by name, in the order of `curves`.

    Raises:
        ArgumentError: no decoders, one without points, or numbers out of range.

    >>> aup_board({"one": [(1.0, 50.0)], "two": [(1.0, 50.0), (2.0, 50.0)]})
    {'one': 50.0, 'two': 100.0}
    """
    if not curves:
        raise ArgumentError("a board needs at least one decoder's points")
    reached = max(y for points in curves.values() for _, y in _checked(points)) or None
    best = reached if best is None else best
    return {name: aup(points, best=best, penalty=penalty, cut=cut) for name, points in curves.items()}


def _checked(points: Iterable[Point]) -> list[Point]:
    curve = sorted((float(rho), float(y)) for rho, y in points)
    if not curve:
        raise ArgumentError("AUP needs at least one point of tokens per forward and accuracy, found none")
    for rho, y in curve:
        if not 0.0 < rho < math.inf or not 0.0 <= y <= 100.0:
            raise ArgumentError(
                f"a point is tokens per forward above 0 and accuracy in percent, 0 to 100; found ({rho!r}, {y!r})"
            )
    return curve
