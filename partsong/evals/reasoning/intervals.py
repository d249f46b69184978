"""Computes how certain an accuracy is, and whether one strategy really beats another on the same problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partsong.errors import ArgumentError
from partsong.knobs import Count, check_value
from partsong.seeds import check_seed

__all__ = ["Difference", "Resampler", "clopper_pearson", "wilson"]

#: Resamples of one batch, small enough for their problem numbers to fit into the cache.
_CHUNK = 256


def wilson(right: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """Returns Wilson's score interval of a share, which is narrow and never outside 0 to 1.

    On average it covers the true share about as often as its level says.

    Args:
        right: how many problems were answered rightly.
        total: how many problems there are.
        level: of confidence, between 0 and 1.

    Returns:
        Lower and upper end, fractions.

    Raises:
        ArgumentError: the numbers contradict each other.

    Source: Wilson, Journal of the American Statistical Association 22, 1927.

    >>> tuple(round(end, 3) for end in wilson(2, 24))
    (0.023, 0.258)
    """
    _check(right, total, level)
    z, share = NormalDist().inv_cdf(0.5 + level / 2), right / total
    middle, weight = share + z * z / (2 * total), 1 + z * z / total
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    low, high = (middle - half) / weight, (middle + half) / weight
    return (0.0 if right == 0 else low), (1.0 if right == total else high)


def clopper_pearson(right: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """Returns the exact interval of a share, which covers every share at least as often as its level says.

    It is wider than `wilson`, whose arguments and errors it has.

    Source: Clopper and Pearson, Biometrika 26, 1934.

    >>> tuple(round(end, 4) for end in clopper_pearson(2, 24))
    (0.0103, 0.27)
    """
    _check(right, total, level)
    tail = (1 - level) / 2
    low = 0.0 if right == 0 else _share_where(lambda p: 1 - _at_most(right - 1, total, p), tail, rising=True)
    high = 1.0 if right == total else _share_where(lambda p: _at_most(right, total, p), tail, rising=False)
    return low, high


def _share_where(chance: Callable[[float], float], tail: float, *, rising: bool) -> float:
    """Finds the share at which a monotone chance is `tail`, by bisection to the last bit."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if (chance(middle) < tail) == rising:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _at_most(right: int, total: int, share: float) -> float:
    """Returns the chance of at most `right` right answers, by the binomial distribution."""
    logs = [
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) + k * math.log(share)
        + (total - k) * math.log1p(-share)
        for k in range(right + 1)
    ]  # fmt: skip
    return min(math.fsum(map(math.exp, logs)), 1.0)


def _check(right: int, total: int, level: float) -> None:
    if not 0 <= right <= total or total < 1:
        raise ArgumentError(f"{right} right answers of {total}; give counts with 0 <= right <= total and total >= 1")
    if not 0 < level < 1:
        raise ArgumentError(f"level={level}; use a number between 0 and 1, such as 0.95")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Says how much better one strategy is than another on the same problems.

    Attributes:
        mean: difference of the accuracies.
        low: lower end of its interval.
        high: upper end.
        p: the two-sided p-value, at most 1: twice the share of resamples whose difference is zero or of the other sign.
    """

    mean: float
    low: float
    high: float
    p: float


class Resampler:
    """Resamples the problems and scores all strategies on the same ones, so that any two can be compared in pairs.

    Problems are drawn with replacement. Every draw is the same for all strategies, so how hard a problem is cancels in
    the difference.

    Args:
        scores: for each strategy a number per problem, such as 1 for a right answer and 0 for a wrong one.
        resamples: how many.
        seed: of the draws.

    Raises:
        ArgumentError: there are no strategies or problems, or the scores differ in length.
    """

    def __init__(self, scores: Mapping[str, Sequence[float]], *, resamples: Count = 10_000, seed: int = 0) -> None:
        lengths = {name: len(values) for name, values in scores.items()}
        if not lengths or len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ArgumentError(f"paired scores need the same problems for all, found {lengths or 'none'}")
        check_value("resamples", resamples, Count)
        self.names = list(scores)
        self.scores = np.asarray([scores[name] for name in self.names], np.float64)
        self.means: NDArray[np.float64] = self._resampled(resamples, check_seed(seed))

    def _resampled(self, resamples: int, seed: int) -> NDArray[np.float64]:
        """Returns the mean score of each strategy on each resample."""
        rng, problems = np.random.default_rng(seed), self.scores.shape[1]
        parts = []
        for begin in range(0, resamples, _CHUNK):
            size = min(_CHUNK, resamples - begin)
            drawn = rng.integers(0, problems, (size, problems), dtype=np.int32)
            drawn += np.arange(size, dtype=np.int32)[:, None] * problems
            # With how often each problem was drawn, one product scores all strategies.
            counts = np.bincount(drawn.ravel(), minlength=size * problems).reshape(size, problems)
            parts.append(self.scores @ counts.T.astype(np.float64))
        return np.concatenate(parts, axis=1) / problems

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Returns the percentile interval of a strategy's mean score."""
        ends = np.quantile(self.means[self.names.index(name)], [(1 - level) / 2, (1 + level) / 2])
        return float(ends[0]), float(ends[1])

    def difference(self, name: str, other: str, level: float = 0.95) -> Difference:
        """Measures how much better `name` is than `other`."""
        first, second = self.names.index(name), self.names.index(other)
        differences = self.means[first] - self.means[second]
        # Sums of equal scores in another order differ in the last bits.
        differences[np.abs(differences) < 1e-12] = 0.0
        low, high = np.quantile(differences, [(1 - level) / 2, (1 + level) / 2])
        beyond = int(min(np.count_nonzero(differences <= 0), np.count_nonzero(differences >= 0)))
        mean = float(self.scores[first].mean() - self.scores[second].mean())
        p = min(1.0, 2 * (beyond + 1) / (len(differences) + 1))
        return Difference(mean=mean, low=float(low), high=float(high), p=p)

    def rows(self, base: str, level: float = 0.95) -> list[dict[str, Any]]:
        """Compares every other strategy with `base`: flat rows ``strategy than problems difference low high p``."""
        rows = []
        for name in self.names:
            if name != base:
                gain = self.difference(name, base, level)
                row = {"strategy": name, "than": base, "problems": self.scores.shape[1], "difference": gain.mean}
                rows.append(row | {"low": gain.low, "high": gain.high, "p": gain.p})
        return rows
