"""Executes on one rank what the first rank of a replica has decided."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from partsong.errors import DistributedError, PartsongError
from partsong.ledger import Ledger
from partsong.parallel import Mesh
from partsong.parallel.hooks.model_hooks import as_called
from partsong.serving.messages import DenoiseAnswer, DenoiseCall, JobWork, Spent
from partsong.serving.ranks.orders import Orders, compare_ranks, share_failures
from partsong.serving.ranks.outcome import TurnOutcome
from partsong.serving.ranks.paused_job import PausedJob, refused
from partsong.serving.ranks.served_model import ServedModel
from partsong.serving.ranks.session import Session
from partsong.serving.ranks.whole_job import WholeJob

__all__ = ["Floor"]


class Floor:
    """Holds the jobs running on one rank.

    Args:
        model: what runs them.
        mesh: all ranks.
        shares_files: whether every rank writes where the server reads, so that all of them may decode.

    Attributes:
        jobs: by name. Those of the serial twin are on the first rank alone.
    """

    def __init__(self, model: ServedModel, mesh: Mesh, *, shares_files: bool) -> None:
        self.jobs: dict[str, PausedJob] = {}
        self._session: Session | None = None
        self._decoders = itertools.cycle(range(mesh.world_size if shares_files else 1))
        self._model, self._mesh, self._everyone = model, mesh, mesh.on_host("data")

    def carry_out(self, orders: Orders, report: Callable[[JobWork, int, int], bool]) -> TurnOutcome:
        """Executes the first rank's orders.

        Args:
            orders: the same on every rank.
            report: takes a job that runs whole, its steps made and in all; says on the first rank whether to drop it.

        Raises:
            RankError: the ranks ended the step differently.
            Exception: the model failed in the middle of a call; only a restart helps.
        """
        outcome, begin = TurnOutcome(), time.perf_counter()
        with Ledger(flops=False) as record:
            for name in orders.dropped:
                self._end(name)
                outcome.dropped.append(name)
            self._set(orders, outcome)
            for work in orders.begun:
                if work.id not in outcome.failed and (work.strategies or self._mesh.is_main):
                    self._begin(work, outcome)
            if orders.whole is not None:
                WholeJob(self._model, self._mesh, orders.whole, report).run(outcome)
            if orders.call is not None and self._session is not None:
                self._answer(self._session, orders.call, outcome)
            here = [self.jobs[name] for name in orders.steps if name in self.jobs]
            if here:
                self._step(here, outcome)
            amounts = record.summary()
        spent = Spent(int(amounts["bytes_sent"]), amounts["seconds_waiting"])
        alone = not self._model.setting[0] and orders.whole is None
        number = 0.0 if alone else outcome.number()
        outcome.spent, is_uneven = compare_ranks(self._everyone, number, len(outcome.failed), spent)
        if is_uneven:
            outcome.fail(share_failures(self._everyone, outcome.failed))
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def close(self) -> None:
        """Ends every job where it stands."""
        for name in list(self.jobs):
            self._end(name)

    def _set(self, orders: Orders, outcome: TurnOutcome) -> None:
        if orders.setting is None:
            return
        try:
            self._model.switch(orders.setting)
        except PartsongError as error:
            outcome.failed |= {work.id: error for work in orders.begun}

    def _begin(self, work: JobWork, outcome: TurnOutcome) -> None:
        if work.is_session:
            self._session = Session(self._model, work)
            return
        try:
            # All ranks count alike. A job without strategies is only on the first one.
            decoder = next(self._decoders) if work.strategies else 0
            job = self.jobs[work.id] = PausedJob(self._model, work, decodes=self._mesh.rank == decoder)
            job.begin()
            if job.is_done:
                self._end(work.id)
                outcome.done.append(work.id)
        except PartsongError as error:
            self._end(work.id)
            outcome.failed[work.id] = error

    def _step(self, jobs: list[PausedJob], outcome: TurnOutcome) -> None:
        """Makes one call of the denoiser for all of the jobs, and lets each continue to its next one."""
        joined, nums = self._model.joined, [job.work.num for job in jobs]
        named = joined.join([job.arguments for job in jobs], nums) if len(jobs) > 1 else jobs[0].arguments
        try:
            with torch.no_grad():
                output = as_called(self._model.denoiser, jobs[0].positions)(**named)
        except (DistributedError, torch.AcceleratorError):  # another rank or the device is gone: only a restart helps
            raise
        except Exception as error:  # noqa: BLE001 - any model can fail in any way; mostly on all ranks alike
            self._fail([job.work.id for job in jobs], type(self._model.pipe).__name__, error, outcome)
            return
        for index, job in enumerate(jobs):
            part = output if len(jobs) == 1 else joined.part(output, nums, index)
            self._go_on(job, part, outcome)

    def _answer(self, session: Session, call: DenoiseCall, outcome: TurnOutcome) -> None:
        """Makes a client's call of the denoiser."""
        try:
            body = session.read(call)
        except PartsongError as error:
            outcome.answer = DenoiseAnswer(id=call.id, number=call.number, error=error)
            return
        try:
            prediction = session.answer(body, writes=self._mesh.is_main)
        except (DistributedError, torch.AcceleratorError):
            raise
        except Exception as error:  # noqa: BLE001 - as in `_step`
            self._fail([call.id], type(self._model.denoiser).__name__, error, outcome)
            return
        outcome.answer = DenoiseAnswer(id=call.id, number=call.number, body=prediction)

    def _fail(self, names: list[str], caller: str, error: Exception, outcome: TurnOutcome) -> None:
        """Ends jobs whose call of the denoiser has failed."""
        self._mesh.abandon()  # if it failed here alone, the next exchange says so, and the ranks start anew
        for name in names:
            self._end(name)
            outcome.failed[name] = refused(caller, error)

    def _go_on(self, job: PausedJob, output: Any, outcome: TurnOutcome) -> None:
        try:
            has_stepped = job.answer(output)
        except PartsongError as error:
            self._end(job.work.id)
            outcome.failed[job.work.id] = error
            return
        if job.is_done:
            self._end(job.work.id)
            outcome.done.append(job.work.id)
            outcome.ended.append(job)
        elif has_stepped:
            outcome.stepped.append(job.work.id)

    def _end(self, name: str) -> None:
        job = self.jobs.pop(name, None)
        if job is not None:
            job.close()
        if self._session is not None and self._session.work.id == name:
            self._session = None
            self._model.switch(((), None))  # what strategies have kept goes with it
