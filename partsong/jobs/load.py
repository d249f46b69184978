"""Measures how busy other programs keep the processors, to tell disturbed measurements from quiet ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import psutil

__all__ = ["DISTURBED", "LoadWatch", "spread"]

#: A measurement is disturbed if other programs take more than this share of the processors, or if repeats differ by
#: more than this share.
DISTURBED = 0.05


class _Used(NamedTuple):
    """Counts processor seconds: of all cores, the busy part of those, and our own part of that."""

    all: float
    busy: float
    own: float


class LoadWatch:
    """Compares the processor time of all processes from now on with that of this one and its children.

    Args:
        seconds: how long the processors are watched before anything starts.

    Attributes:
        before: the share of all cores that was busy in this time.

    Example:
        >>> watch = LoadWatch(seconds=0.1)
        >>> 0 <= watch.of_others() <= 1
        True
    """

    def __init__(self, seconds: float = 1.0) -> None:
        self.before: float = psutil.cpu_percent(interval=seconds) / 100
        self._begin = _used()

    def of_others(self, beside: float = 0.0) -> float:
        """Returns the share of all cores that others took since the watch began, other guests of the host included.

        Args:
            beside: processor seconds, since then, of processes that belong to this one without being its children.
        """
        now = _used()
        total, busy, own = (b - a for a, b in zip(self._begin, now, strict=True))
        return min(1.0, max(0.0, busy - own - beside) / total) if total > 0 else 0.0

    def report(self) -> dict[str, float]:
        """Returns both shares, for files of results."""
        return {"load_before": round(self.before, 3), "load_of_others": round(self.of_others(), 3)}


def spread(seconds: Sequence[float]) -> float:
    """Returns the interquartile range of some times as a share of their median.

    >>> spread([1.0, 1.0, 1.1, 1.2, 9.0])
    0.18
    """
    if len(seconds) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return round((third - first) / middle, 3)


def _used() -> _Used:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Linux counts the time of guests in `user`, too.
    everything = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    me = psutil.Process()
    own = sum(me.cpu_times()[:4])
    for child in me.children(recursive=True):
        try:
            own += sum(child.cpu_times()[:4])
        except psutil.Error:  # it has just ended, so its parent counts it
            continue
    return _Used(everything, everything - idle, own)
