"""Tracks which replica of a model has which job, and chooses the one for the next."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Roster"]


class Roster:
    """Assigns each job to the least busy replica, and reassigns the jobs of lost ones.

    Args:
        num: number of replicas.

    Attributes:
        up: replicas that take jobs, by number.

    >>> roster = Roster(2)
    >>> roster.up |= {0, 1}
    >>> [roster.place(name) for name in "abc"], roster.lose(0)
    ([0, 1, 0], (['a', 'c'], []))
    """

    def __init__(self, num: int) -> None:
        self.up: set[int] = set()
        self._num = num
        self._places: dict[str, int] = {}  # in the order in which jobs were placed
        self._begun: set[str] = set()
        self._moving: set[str] = set()

    def place(self, name: str, can_take: Callable[[int], bool] = lambda number: True) -> int | None:
        """Gives a job to the replica with the fewest jobs; returns its number, or None where none takes it.

        Args:
            name: of the job.
            can_take: hands the job over; returns whether that worked.
        """
        for number in sorted(self.up, key=lambda number: (self.load(number), number)):
            if can_take(number):
                self._places[name] = number
                return number
        return None

    def where(self, name: str) -> int | None:
        """Returns the replica that has a job; None if no replica has it."""
        return self._places.get(name)

    def load(self, number: int) -> int:
        """Counts the jobs of a replica."""
        return sum(place == number for place in self._places.values())

    def rest(self, number: int) -> list[str]:
        """Gives a replica no further jobs; returns those that wait there."""
        self.up.discard(number)
        return [name for name, place in self._places.items() if place == number and name not in self._begun]

    def begin(self, name: str) -> None:
        """Notes that a job is running."""
        self._begun.add(name)
        self._moving.discard(name)

    def end(self, name: str) -> None:
        """Removes a job."""
        self._places.pop(name, None)
        self._begun.discard(name)
        self._moving.discard(name)

    def lose(self, number: int) -> tuple[list[str], list[str]]:
        """Removes a replica; returns the jobs that waited there and those that were running, the oldest first."""
        self.up.discard(number)
        every = [name for name, place in self._places.items() if place == number]
        begun = [name for name in every if name in self._begun]
        waiting = [name for name in every if name not in self._begun]
        for name in every:
            self.end(name)
        return waiting, begun

    def to_move(self) -> list[tuple[str, int]]:
        """Returns waiting jobs that should move to a less busy replica, with its number; each is named once.

        The youngest move first, until the loads differ by at most one job or nothing waits at the busiest replica.
        """
        loads = {number: self.load(number) for number in self.up}
        for name in self._moving:
            loads[self._places[name]] -= 1
        moves = []
        # A job in transit has no known destination yet; it is counted at the least busy replica.
        for _ in self._moving:
            loads[min(loads, key=lambda number: (loads[number], number))] += 1
        while len(loads) > 1:
            most, least = (end(loads, key=lambda number: (loads[number], number)) for end in (max, min))
            if loads[most] - loads[least] < 2 or (name := self._youngest(most)) is None:
                return moves
            moves.append((name, most))
            self._moving.add(name)
            loads[most] -= 1
            loads[least] += 1
        return moves

    def _youngest(self, number: int) -> str | None:
        names = [name for name, place in self._places.items() if place == number]
        free = (name for name in reversed(names) if name not in self._begun and name not in self._moving)
        return next(free, None)
