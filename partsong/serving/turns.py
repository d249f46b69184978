"""Decides which jobs of a replica make their next step together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["Standing", "charge", "choose", "entry_time"]


@dataclass(slots=True)
class Standing:
    """Says where a job is in the order.

    Attributes:
        id: of the job.
        arrived: its number in the order of arrival.
        deadline: when it should be done, in seconds of `time.time`; None for no hurry.
        remaining: seconds that the rest of it should take by itself.
        used: seconds that the replica spent on it, counting its part of each shared step.
        shape: that of its next call of the model; calls of one shape can be joined.
        rows: how many samples its next call has.
        memory: bytes that it holds at its peak, beside the weights; 0 where unknown.
    """

    id: str
    arrived: int
    deadline: float | None = None
    remaining: float = 0.0
    used: float = 0.0
    shape: Hashable = None
    rows: int = 1
    memory: int = 0


def choose(standings: Sequence[Standing], *, max_rows: int, now: float) -> list[str]:
    """Returns the jobs that make the next step together, all of one shape.

    A job that would miss its deadline if it waited leads, the most urgent one first. Otherwise the job on which
    the replica has spent least leads, the oldest of equals. Jobs whose next call has the leader's shape join it while
    there is room, in the same order. So a rare size gets its share beside a popular one.

    Args:
        standings: the jobs that could make a step.
        max_rows: most samples in one call; a job that has more makes its step by itself.
        now: in seconds of `time.time`.

    >>> small = [Standing("a", 0, shape=64), Standing("b", 1, shape=64)]
    >>> choose([*small, Standing("c", 2, shape=128)], max_rows=8, now=0.0)
    ['a', 'b']
    """
    if not standings:
        return []
    order = sorted(standings, key=lambda each: _urgency(each, now))
    leader, rows, chosen = order[0], 0, []
    for each in order:
        if each.shape == leader.shape and (not chosen or rows + each.rows <= max_rows):
            chosen.append(each.id)
            rows += each.rows
    return chosen


def charge(chosen: Sequence[Standing], seconds: float) -> None:
    """Notes that some jobs have shared a step that took `seconds`."""
    for each in chosen:
        each.used += seconds / len(chosen)


def entry_time(standings: Sequence[Standing]) -> float:
    """Returns the seconds that a new job counts as used: those of the job with the fewest, instead of none.

    With none, a stream of new jobs would starve the others.
    """
    return min((each.used for each in standings), default=0.0)


def _urgency(each: Standing, now: float) -> tuple[int, float, int]:
    slack = None if each.deadline is None else each.deadline - now - each.remaining
    if slack is not None and slack <= each.remaining:
        return (0, slack, each.arrived)
    return (1, each.used, each.arrived)
