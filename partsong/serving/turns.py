"""Decides which jobs of a replica begin, and which make their next step together; users have equal shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

__all__ = ["Shares", "Standing", "choose", "entry_time"]


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
        user: whose job it is.
    """

    id: str
    arrived: int
    deadline: float | None = None
    remaining: float = 0.0
    used: float = 0.0
    shape: Hashable = None
    rows: int = 1
    memory: int = 0
    user: str = ""


class Owned(Protocol):
    """Describes a job that is somebody's."""

    @property
    def user(self) -> str:
        """Returns whose it is."""
        ...


Job = TypeVar("Job", bound=Owned)


@dataclass(slots=True)
class Shares:
    """Counts the seconds that a replica has spent on each user's jobs.

    Attributes:
        used: the seconds, by user.
    """

    used: dict[str, float] = field(default_factory=dict)

    def arrive(self, user: str, present: Iterable[str]) -> None:
        """Lets a user in who had no job: with less than those that are present, they would keep these waiting.

        Args:
            user: who comes.
            present: the users that have jobs.
        """
        least = min((self.used.get(each, 0.0) for each in present), default=0.0)
        self.used[user] = max(self.used.get(user, 0.0), least)

    def charge(self, chosen: Sequence[Standing], seconds: float) -> None:
        """Notes that some jobs have shared a step that took `seconds`."""
        for each in chosen:
            each.used += seconds / len(chosen)
            self.add(each.user, seconds / len(chosen))

    def add(self, user: str, seconds: float) -> None:
        """Notes seconds of a job that ran by itself."""
        self.used[user] = self.used.get(user, 0.0) + seconds

    def order(self, waiting: Sequence[Job], running: Iterable[Owned]) -> list[Job]:
        """Returns jobs that wait, the oldest first, in the order in which they should begin.

        The next one is of the user with the fewest jobs before it, of those the one that had the fewest seconds.

        >>> works = [Standing(name, 0, user=name[0]) for name in ("a1", "a2", "a3", "b1")]
        >>> [work.id for work in Shares().order(works, [])]
        ['a1', 'b1', 'a2', 'a3']
        """
        before = Counter(each.user for each in running)
        places = list[tuple[int, float, int]]()
        for number, work in enumerate(waiting):
            places.append((before[work.user], self.used.get(work.user, 0.0), number))
            before[work.user] += 1
        return [waiting[number] for _, _, number in sorted(places)]


def choose(
    standings: Sequence[Standing], *, max_rows: int, now: float, used: Mapping[str, float] | None = None
) -> list[str]:
    """Returns the jobs that make the next step together, all of one shape.

    A job that would miss its deadline if it waited leads, the most urgent one first. Otherwise a job of the user on
    whose jobs the replica has spent least leads, of those the one that had least itself, the oldest of equals. Jobs
    whose next call has the leader's shape join it while there is room, in the same order. So a rare size gets its share
    beside a popular one.

    Args:
        standings: the jobs that could make a step.
        max_rows: most samples in one call; a job that has more makes its step by itself.
        now: in seconds of `time.time`.
        used: seconds spent on the jobs of each user.

    >>> small = [Standing("a", 0, shape=64), Standing("b", 1, shape=64)]
    >>> choose([*small, Standing("c", 2, shape=128)], max_rows=8, now=0.0)
    ['a', 'b']
    """
    if not standings:
        return []
    order = sorted(standings, key=lambda each: _urgency(each, now, (used or {}).get(each.user, 0.0)))
    leader, rows, chosen = order[0], 0, []
    for each in order:
        if each.shape == leader.shape and (not chosen or rows + each.rows <= max_rows):
            chosen.append(each.id)
            rows += each.rows
    return chosen


def entry_time(standings: Sequence[Standing]) -> float:
    """Returns the seconds that a new job counts as used: those of the job with the fewest, instead of none.

    With none, a stream of new jobs would starve the others.
    """
    return min((each.used for each in standings), default=0.0)


def _urgency(each: Standing, now: float, of_user: float) -> tuple[int, float, float, int]:
    slack = None if each.deadline is None else each.deadline - now - each.remaining
    if slack is not None and slack <= each.remaining:
        return (0, slack, 0.0, each.arrived)
    return (1, of_user, each.used, each.arrived)
