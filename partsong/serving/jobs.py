"""Keeps what a server knows of its jobs, and notifies everybody who waits for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from partsong.serving.messages import Spent, by_rank

__all__ = ["ENDED", "Job", "Status", "Watchers"]

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled"]

#: Final states of a job.
ENDED: tuple[Status, ...] = ("completed", "failed", "cancelled")


@dataclass(kw_only=True, slots=True)
class Job:
    """Describes a job from its request to the end of its files.

    Attributes:
        id: its name, chosen by the server.
        kind: what it makes.
        model: name of its model.
        request: what the client asked for, with nothing of the server's own in it.
        strategy: how the ranks share the work, as on a command line; ``serial`` for none.
        advice: why this strategy, where the server chose it.
        exactness: ``exact``, ``bounded`` or ``approximate``.
        status: where it stands.
        created_at: in seconds of `time.time`, as all times here.
        started_at: when it began; None before.
        completed_at: when it ended; None before.
        expires_at: when its files are removed; None before it ended.
        step: steps made.
        steps: steps in all; 0 where unknown.
        spent: what each rank has spent.
        seconds: wall time of its work; None before it is done.
        files: names of its files.
        made_size: width and height in pixels of what it made, such as ``128x96``; None before it is done.
        twin: the job of its serial twin; None where it was not requested.
        twin_of: the job whose twin it is; None for others.
        max_abs_diff: from its twin, of values in [0, 1]; None until both are done.
        psnr_to_serial: in dB; None until both are done.
        error: code and message; None without one.
        note: what else a client should know; None for nothing.
        losses: how often its ranks died.
        user: name of who asked for it; empty for the operator.
    """

    id: str
    kind: Literal["image", "video"]
    model: str
    request: dict[str, Any]
    strategy: str = "serial"
    advice: str | None = None
    exactness: str | None = None
    status: Status = "queued"
    created_at: float = field(default_factory=time.time)
    started_at: float | None = None
    completed_at: float | None = None
    expires_at: float | None = None
    step: int = 0
    steps: int = 0
    spent: tuple[Spent, ...] = ()
    seconds: float | None = None
    files: tuple[str, ...] = ()
    made_size: str | None = None
    twin: str | None = None
    twin_of: str | None = None
    max_abs_diff: float | None = None
    psnr_to_serial: float | None = None
    error: dict[str, str] | None = None
    note: str | None = None
    losses: int = 0
    user: str = ""

    @property
    def has_ended(self) -> bool:
        """Says whether nothing will change any more."""
        return self.status in ENDED

    @property
    def progress(self) -> int:
        """Returns the percentage of steps made; 100 only when the job is done."""
        if self.status == "completed":
            return 100
        return min(99, round(100 * self.step / self.steps)) if self.steps else 0

    def begin_anew(self, note: str) -> None:
        """Puts the job back into the queue, as if it had not begun.

        Args:
            note: why.
        """
        self.status, self.started_at, self.step, self.spent, self.files = "queued", None, 0, (), ()
        self.note = f"started from its first step {note}"

    def as_json(self, position: int = 0) -> dict[str, Any]:
        """Returns it by the keys of the API.

        Args:
            position: how many jobs of its model are ahead of it.
        """
        sizes = [self.request.get("width"), self.request.get("height")]
        return {
            "id": self.id,
            "object": "job",
            "kind": self.kind,
            "model": self.model,
            "status": self.status,
            "created_at": int(self.created_at),
            "started_at": _whole(self.started_at),
            "completed_at": _whole(self.completed_at),
            "expires_at": _whole(self.expires_at),
            "prompt": self.request.get("prompt", ""),
            "n": self.request.get("n", 1),
            "size": None if None in sizes else "x".join(map(str, sizes)),
            "made_size": self.made_size,
            "seed": self.request.get("seed", 0),
            "strategy": self.strategy,
            "advice": self.advice,
            "step": self.step,
            "steps": self.steps,
            "progress": self.progress,
            "position": position,
            "outputs": [{"url": f"/v1/files/{name}", "kind": self.kind} for name in self.files],
            "ranks": by_rank(self.spent),
            "class": self.exactness,
            "seconds": self.seconds,
            "twin": self.twin,
            "twin_of": self.twin_of,
            "max_abs_diff": self.max_abs_diff,
            "psnr_to_serial": self.psnr_to_serial,
            "error": self.error,
            "note": self.note,
            "user": self.user or None,
        }

    def as_record(self) -> dict[str, Any]:
        """Returns all of it in plain values, for the journal."""
        return asdict(self)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Job:
        """Reads what `as_record` returned, also after a trip through JSON."""
        values = dict(record)
        values["spent"] = tuple(Spent(**spent) for spent in values["spent"])
        values["files"] = tuple(values["files"])
        return Job(**values)


class Watchers:
    """Notifies everybody who waits for changes of jobs; a slow reader gets only the latest change."""

    def __init__(self) -> None:
        self._changed: dict[str, asyncio.Event] = {}
        self._previews: dict[str, tuple[int, tuple[bytes, ...]]] = {}

    def change(self, name: str) -> None:
        """Notes that a job has changed."""
        event = self._changed.pop(name, None)
        if event is not None:
            event.set()

    def show(self, name: str, step: int, pictures: tuple[bytes, ...]) -> None:
        """Stores the previews of a job after a step."""
        self._previews[name] = step, pictures
        self.change(name)

    def preview(self, name: str) -> tuple[int, tuple[bytes, ...]]:
        """Returns the last step that was shown, and its pictures; 0 and none before the first."""
        return self._previews.get(name, (0, ()))

    def forget(self, name: str) -> None:
        """Forgets the pictures of a job that has ended."""
        self._previews.pop(name, None)
        self.change(name)

    async def changes(self, job: Job, patience: float) -> AsyncIterator[bool]:
        """Yields True at each change of a job until it has ended, and False whenever nothing changed for a while.

        Args:
            job: the job.
            patience: seconds without a change before it yields False.
        """
        while not job.has_ended:
            event = self._changed.setdefault(job.id, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), patience)
                yield True
            except TimeoutError:
                yield False


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
