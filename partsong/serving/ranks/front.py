"""Stands between the server and the ranks of a replica: takes requests and reports results."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from partsong.accelerator import memory_in_use
from partsong.parallel import Mesh
from partsong.samplers.registry import parse_strategy
from partsong.serving.messages import (
    Cancel,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobStarted,
    JobStepped,
    JobWork,
    Pulse,
    Spent,
)
from partsong.serving.ranks.colours import LatentColours, shown_at
from partsong.serving.ranks.desk import Desk
from partsong.serving.ranks.floor import Floor
from partsong.serving.ranks.forecast import MemoryForecast
from partsong.serving.ranks.office import Office
from partsong.serving.ranks.orders import Orders
from partsong.serving.ranks.outcome import TurnOutcome
from partsong.serving.ranks.paused_job import PausedJob
from partsong.serving.ranks.served_model import ServedModel, can_join, description
from partsong.serving.ranks.settings import ReplicaSettings

__all__ = ["Front"]


@dataclass(slots=True)
class _Account:
    """Counts what a job has cost.

    Attributes:
        spent: by rank.
        begun: when it began, in seconds of `time.perf_counter`.
    """

    spent: tuple[Spent, ...]
    begun: float = field(default_factory=time.perf_counter)

    def add(self, spent: tuple[Spent, ...], sharers: int) -> None:
        """Adds its part of a step that several jobs shared."""
        self.spent = tuple(
            Spent(one.bytes_sent + more.bytes_sent // sharers, one.seconds_waiting + more.seconds_waiting / sharers)
            for one, more in zip(self.spent, spent, strict=True)
        )


class Front:
    """Holds what only the first rank has: the office, the desk, and the accounts of the jobs.

    Args:
        settings: what the replica serves.
        model: what runs it.
        mesh: all ranks.
        floor: the jobs running on this rank.
        calls_per_step: how often the pipeline calls its model in a step.
        forecast: predicts the memory of jobs; None where it cannot.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        model: ServedModel,
        mesh: Mesh,
        floor: Floor,
        calls_per_step: int,
        forecast: MemoryForecast | None,
    ) -> None:
        self._settings, self._model, self._floor = settings, model, floor
        self._office = Office(settings, model, mesh, forecast)

        def join(work: JobWork) -> bool:
            return not work.is_session and can_join(work.strategies, calls_per_step)

        room = None if forecast is None else forecast.room
        self._desk = Desk(join, max_rows=settings.max_rows, max_active=settings.max_active, room=room)
        self._colours = _colours(model)
        self._accounts: dict[str, _Account] = {}
        self._ranks, self._device = mesh.world_size, mesh.device
        self._office.send(description(settings, model, mesh))

    def orders(self) -> Orders:
        """Returns what the ranks do next; waits a moment where there is nothing to do."""
        for message in self._office.asked(self._settings.pulse if self._desk.is_idle else 0.0):
            if (left := self._desk.take(message)) is not None:
                self._office.send(left)
        orders = self._desk.orders()
        for work in (*orders.begun, *(() if orders.whole is None else (orders.whole,))):
            self._accounts[work.id] = _Account((Spent(),) * self._ranks)
            self._office.send(JobStarted(work.id))
        self._office.unstoppable = None if orders.whole is None or self._can_stop(orders.whole) else orders.whole.id
        return orders

    def report(self, work: JobWork, step: int, steps: int) -> bool:
        """Reports a step of a job that runs by itself; says whether to drop it."""
        self._office.send(JobStepped(id=work.id, step=step, steps=steps))
        cancelled = False
        for message in self._office.asked(0.0):
            cancelled = cancelled or (isinstance(message, Cancel) and message.id == work.id)
            if (left := self._desk.take(message)) is not None:
                self._office.send(left)
        return cancelled

    def tell(self, orders: Orders, outcome: TurnOutcome) -> None:
        """Reports the outcome of orders to the server, and notes it for the next ones."""
        self._desk.charge(orders, outcome.seconds)
        for name in outcome.dropped:
            self._office.send(JobCancelled(name))
        for name, error in outcome.failed.items():
            self._office.send(JobFailed(name, error))
            self._desk.unset()
        self._office.unstoppable = None
        if outcome.answer is not None and outcome.answer.id not in outcome.failed:
            self._office.send(replace(outcome.answer, spent=outcome.spent, seconds=outcome.seconds))
        sharers = [*outcome.stepped, *outcome.done]
        for name in sharers:
            self._accounts[name].add(outcome.spent, len(sharers))
        for name in outcome.done:
            account = self._accounts[name]
            self._office.send(JobFinished(id=name, spent=account.spent, seconds=time.perf_counter() - account.begun))
        colours = self._colours
        for job in outcome.ended if colours is not None else ():
            assert colours is not None
            if job.images is None:  # another rank decoded them
                continue
            colours.learn(job.pipe, job.arguments, self._model.sample, job.latents, job.images)
        for name in (*outcome.done, *outcome.failed, *outcome.dropped):
            self._desk.forget(name)
            self._accounts.pop(name, None)
        # All other jobs still wait for the same calls of the model.
        moved = {*orders.steps, *(work.id for work in orders.begun)}
        for name in moved & self._desk.standings.keys():
            standing = self._desk.standings[name]
            job = self._floor.jobs[name]
            standing.shape = self._model.joined.shape(job.arguments, job.work.num) or name
            standing.rows = len(job.arguments[self._model.sample])
            standing.remaining = outcome.seconds * (job.steps - job.step)
        for name in outcome.stepped:
            self._tell_step(self._floor.jobs[name])
        self._office.send(Pulse(memory_in_use(self._device)))

    def _tell_step(self, job: PausedJob) -> None:
        previews: tuple[bytes, ...] = ()
        wanted = job.step in shown_at(job.steps, job.work.previews)
        if wanted and self._colours is not None and job.last is not None:
            previews = self._colours.preview(job.pipe, job.arguments, self._model.sample, job.last)
        spent = self._accounts[job.work.id].spent
        self._office.send(JobStepped(id=job.work.id, step=job.step, steps=job.steps, spent=spent, previews=previews))

    def _can_stop(self, work: JobWork) -> bool:
        return self._model.tells_steps and not any(parse_strategy(name).has_loop for name in work.strategies)


def _colours(model: ServedModel) -> LatentColours | None:
    """Fits the map of latents to colours; None for a model whose latents are no pictures."""
    if model.makes_videos:
        return None
    try:
        return LatentColours(model.pipe)
    except (AttributeError, ValueError):  # no autoencoder, or one of another kind
        return None
