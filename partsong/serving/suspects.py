"""Tries jobs that have lost their ranks again, one at a time: one of them may be what ended the ranks."""

from __future__ import annotations

from collections.abc import Callable

from partsong.serving.messages import JobWork

__all__ = ["Suspects"]


class Suspects:
    """Holds the jobs of one model that wait to be tried again.

    Args:
        submit: gives a job to the ranks.
    """

    def __init__(self, submit: Callable[[JobWork], None]) -> None:
        self._submit = submit
        self._waiting: list[JobWork] = []
        self._tried: str | None = None

    def holds(self, name: str) -> bool:
        """Says whether a job waits here."""
        return any(work.id == name for work in self._waiting)

    def add(self, work: JobWork) -> None:
        """Takes a job; `try_next` submits it."""
        self.end(work.id)
        self._waiting.append(work)

    def end(self, name: str) -> None:
        """Notes that a job has ended, or has lost its ranks again."""
        self._waiting = [work for work in self._waiting if work.id != name]
        self._tried = None if self._tried == name else self._tried

    def try_next(self) -> None:
        """Submits the next job, unless one is being tried."""
        if self._tried is None and self._waiting:
            work = self._waiting.pop(0)
            self._tried = work.id
            self._submit(work)
