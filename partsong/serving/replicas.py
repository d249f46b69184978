"""Holds the replicas of one model, which look like one to the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from partsong.errors import DistributedError, OutputError, PartsongError
from partsong.serving.messages import (
    JOB_ENDS,
    Cancel,
    Checked,
    DenoiseCall,
    FromRanks,
    JobCancelled,
    JobFailed,
    JobReturned,
    JobStarted,
    JobWork,
    Pulse,
    Ready,
    Recall,
    Stop,
    Submit,
)
from partsong.serving.ranks.settings import ReplicaSettings
from partsong.serving.replica import Replica, StartTrouble
from partsong.serving.roster import Roster
from partsong.serving.runners import RankRunner
from partsong.serving.services import PictureService

__all__ = ["Replicas"]

_log = logging.getLogger(__name__)

#: Seconds between two looks at a replica that is restarted.
_LOOK = 0.1


class Replicas:
    """Distributes the jobs of a model over its replicas, each of which holds a copy of it.

    A job goes to the replica with the fewest jobs. A job that waits while another replica is less busy moves there. The
    queue of a replica that is lost goes to the others, or waits until one is up.

    Args:
        model: what they serve.
        runner: runs the ranks.
        num: number of replicas.
        on_message: takes what a replica says of a job that it has, or that it is ready.
        on_lost: takes the jobs that were running on a replica that has ended, which no replica has any more, and the
            error that ended it.

    Attributes:
        name: of the model.
    """

    def __init__(
        self,
        model: PictureService,
        runner: RankRunner,
        num: int,
        *,
        on_message: Callable[[Replicas, FromRanks], None],
        on_lost: Callable[[Replicas, Mapping[str, JobWork], PartsongError], None],
    ) -> None:
        self.name = model.name
        self._on_message, self._on_lost = on_message, on_lost
        self._roster = Roster(num)
        self._works: dict[str, JobWork] = {}
        self._restarting = asyncio.Lock()
        self._cancelled: set[str] = set()  # in case the ranks die, or give them back, before they are notified
        self._replicas = [
            Replica(
                model.name,
                model.nproc,
                _settings_of(model, number, num) if runner.host is None else model.settings,
                runner=runner,
                on_message=self._take,
                on_down=self._down,
            )
            for number in range(num)
        ]

    def start(self) -> None:
        """Starts all ranks; returns at once."""
        for replica in self._replicas:
            replica.start()

    @property
    def num_ready(self) -> int:
        """Counts the replicas whose ranks have answered lately."""
        return sum(replica.is_ready for replica in self._replicas)

    @property
    def facts(self) -> Ready | None:
        """Returns what the ranks said of their model; None before any was ready."""
        return next((replica.facts for replica in self._replicas if replica.facts is not None), None)

    @property
    def is_up(self) -> bool:
        """Says whether the ranks of a replica take jobs."""
        return bool(self._roster.up)

    @property
    def trouble(self) -> StartTrouble | None:
        """Returns why no replica can be started, by the one that is tried next; None while one is up or starting."""
        every = [replica.trouble for replica in self._replicas]
        known = [trouble for trouble in every if trouble is not None]
        return min(known, key=lambda trouble: trouble.next_at) if len(known) == len(every) else None

    def states(self) -> list[dict[str, Any]]:
        """Returns for each replica whether it is ready, how many jobs it has, and the bytes of its first rank."""
        return [
            {"ready": replica.is_ready, "jobs": self._roster.load(number), "memory": replica.memory}
            for number, replica in enumerate(self._replicas)
        ]

    async def restart(self) -> None:
        """Restarts the replicas one after the other, each when its jobs are done; meanwhile the others take all jobs.

        It stops where one does not come up again.
        """
        async with self._restarting:
            for number, replica in enumerate(self._replicas):
                if number not in self._roster.up:
                    continue  # it is starting
                for name in self._roster.rest(number):
                    replica.send(Recall(name))
                while self._roster.load(number) and number not in self._roster.up:
                    await asyncio.sleep(_LOOK)
                if number in self._roster.up:
                    continue  # its ranks have ended meanwhile, and new ones are there
                replica.send(Stop())
                while number not in self._roster.up:
                    if replica.trouble is not None:
                        _log.error("%s is not restarted further: %s", self.name, replica.trouble)
                        return
                    await asyncio.sleep(_LOOK)

    def submit(self, work: JobWork) -> None:
        """Gives a job to a replica, now or as soon as one is up; a known job stays where it is."""
        if self._works.setdefault(work.id, work) is work:
            self._place(work)

    def cancel(self, name: str) -> None:
        """Cancels a job, whether it waits or runs; a `JobCancelled` follows when that is done."""
        place = self._roster.where(name)
        if place is not None and self._replicas[place].send(Cancel(name)):
            self._cancelled.add(name)
        else:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._forget(name)
        self._on_message(self, JobCancelled(name))

    def _forget(self, name: str) -> None:
        self._works.pop(name, None)
        self._cancelled.discard(name)
        self._roster.end(name)

    def call(self, message: DenoiseCall) -> bool:
        """Passes on a call in a session that has begun; says whether its ranks are connected."""
        place = self._roster.where(message.id)
        return place is not None and self._replicas[place].send(message)

    async def check(self, work: JobWork) -> Checked:
        """Asks a replica whether a job could be carried out.

        Raises:
            DistributedError: none of them answers.
        """
        failure: DistributedError | None = None
        for replica in sorted(self._replicas, key=lambda replica: not replica.is_ready):
            try:
                return await replica.check(work)
            except DistributedError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    async def close(self) -> None:
        """Ends all ranks."""
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    def _place(self, work: JobWork) -> None:
        try:
            message = Submit(work.with_pictures())
        except OSError as error:
            failure = OutputError(f"a picture that was sent with the job is gone: {error}")
            self._forget(work.id)
            self._on_message(self, JobFailed(work.id, failure))
            return
        self._roster.place(work.id, lambda number: self._replicas[number].send(message))

    def _take(self, replica: Replica, message: FromRanks) -> None:
        number = self._replicas.index(replica)
        if isinstance(message, Ready):
            self._roster.up.add(number)
            self._on_message(self, message)
            for work in [each for name, each in self._works.items() if self._roster.where(name) is None]:
                self._place(work)
            self._balance()
        elif not isinstance(message, Pulse) and self._roster.where(message.id) == number:
            self._take_of_job(message)

    def _take_of_job(self, message: FromRanks) -> None:
        assert not isinstance(message, Ready | Pulse)
        if isinstance(message, JobReturned):
            self._roster.end(message.id)
            self._go_elsewhere(message.id)
            return
        if isinstance(message, JobStarted):
            self._roster.begin(message.id)
        elif isinstance(message, JOB_ENDS):
            self._forget(message.id)
        self._on_message(self, message)
        if isinstance(message, (JobStarted, *JOB_ENDS)):
            self._balance()

    def _balance(self) -> None:
        for name, number in self._roster.to_move():
            self._replicas[number].send(Recall(name))

    def _down(self, replica: Replica, error: PartsongError) -> None:
        waiting, begun = self._roster.lose(self._replicas.index(replica))
        for name in [each for each in begun if each in self._cancelled]:
            begun.remove(name)
            self._drop(name)
        self._on_lost(self, {name: self._works.pop(name) for name in begun}, error)
        for name in waiting:
            self._go_elsewhere(name)

    def _go_elsewhere(self, name: str) -> None:
        """Places a job that has not begun and whose replica is gone."""
        if name in self._cancelled:
            self._drop(name)
        elif name in self._works:
            self._place(self._works[name])


def _settings_of(model: PictureService, number: int, num: int) -> ReplicaSettings:
    """Returns the settings of one of several replicas on one machine."""
    return replace(model.settings, replicas_here=num, first_device=number * model.nproc)
