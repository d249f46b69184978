"""Defines a promise of a paper, how it is measured, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from partsong.evals.reasoning.intervals import Resampler

__all__ = ["Effort", "Evidence", "Measure", "Promise", "Verdict", "judged", "ratio"]

#: "holds": as promised. "holds in part": it helps, but less. "not here": it does not help.
Verdict = Literal["holds", "holds in part", "not here"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Says how much to spend on a row.

    Attributes:
        problems: questions or captions of a row.
        samples: largest number of samples of a question.
        rounds: how often each time is taken; the median counts.
        seed: of all draws.
    """

    problems: int = 150
    samples: int = 64
    rounds: int = 5
    seed: int = 11


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Holds what a measurement found.

    Attributes:
        value: the number that the promise is about, in the unit of `measured`.
        low: lower end of its 95 % interval; of times the smallest of all rounds.
        high: upper end.
        measured: the value in words, with its unit and interval.
        cost: what the method took for it.
        verdict: whether the promise holds.
    """

    value: float
    low: float
    high: float
    measured: str
    cost: str
    verdict: Verdict


#: Measures a row; the folder keeps what a stopped run has finished.
Measure = Callable[[Effort, Path], Evidence]


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """Describes a row of the table of promises.

    Attributes:
        method: by the name it has here.
        paper: title and number.
        promise: what the paper says of its method.
        setting: on what it is measured here.
        measure: measures it.
        because: why the verdict is what it is, where that needs words.
    """

    method: str
    paper: str
    promise: str
    setting: str
    measure: Measure
    because: str = ""


def judged(*, met: bool, helps: bool) -> Verdict:
    """Returns the verdict on a promise that was met, or a method that at least helps."""
    return "holds" if met else "holds in part" if helps else "not here"


def ratio(counts: Mapping[str, Sequence[float]], over: str, under: str, seed: int) -> tuple[float, float, float]:
    """Returns the ratio of two means over the same problems, with its 95 % interval by a paired bootstrap.

    >>> ratio({"one": [2.0, 2.0], "other": [4.0, 4.0]}, "one", "other", 0)
    (0.5, 0.5, 0.5)
    """
    drawn = Resampler(counts, seed=seed)
    first, second = (drawn.names.index(name) for name in (over, under))
    low, high = np.quantile(drawn.means[first] / drawn.means[second], [0.025, 0.975])
    return float(np.mean(counts[over]) / np.mean(counts[under])), float(low), float(high)
