"""Holds the outcome of one turn of the ranks for each job."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from partsong.errors import PartsongError
from partsong.serving.messages import DenoiseAnswer, Spent
from partsong.serving.ranks.paused_job import PausedJob

__all__ = ["TurnOutcome"]


@dataclass(slots=True)
class TurnOutcome:
    """Says how orders ended.

    Attributes:
        stepped: jobs that have made a step and go on.
        done: jobs that are finished.
        ended: those of them that took turns.
        failed: jobs that ended in an error, with that error.
        dropped: jobs that were dropped.
        answer: to a client's call of the denoiser; None where there was none, or where another rank has it.
        spent: what each rank spent.
        seconds: how long the ranks took.
    """

    stepped: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    ended: list[PausedJob] = field(default_factory=list)
    failed: dict[str, PartsongError] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    answer: DenoiseAnswer | None = None
    spent: tuple[Spent, ...] = ()
    seconds: float = 0.0

    def fail(self, failed: Mapping[str, PartsongError]) -> None:
        """Notes that jobs ended in an error, on this rank or on another one."""
        self.failed |= failed
        self.done = [name for name in self.done if name not in failed]
        self.ended = [job for job in self.ended if job.work.id not in failed]

    def number(self) -> float:
        """Returns a number that identifies the outcome.

        Only one rank decodes and writes the result of a job, and it may fail at that, so success and failure count as
        the same.
        """
        text = repr((sorted(self.stepped), sorted({*self.done, *self.failed}), sorted(self.dropped)))
        return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little"))
