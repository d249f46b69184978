"""Talks to the server for a replica: only its first rank has an office."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from multiprocessing.connection import Client
from queue import Empty, SimpleQueue

from partsong.errors import PartsongError
from partsong.parallel import Mesh
from partsong.serving.messages import (
    JOB_ENDS,
    Cancel,
    Check,
    Checked,
    FromRanks,
    JobCancelled,
    JobFinished,
    JobReturned,
    JobStepped,
    JobWork,
    Submit,
    ToDesk,
    ToRanks,
)
from partsong.serving.ranks.courier import Courier
from partsong.serving.ranks.forecast import MemoryForecast
from partsong.serving.ranks.served_model import ServedModel, check_sizes, check_work
from partsong.serving.ranks.settings import ReplicaSettings

__all__ = ["Office"]


class Office:
    """Reads the server's requests in a thread of its own, and sends the results.

    Args:
        settings: with the address of the server.
        model: answers whether a job could be carried out.
        mesh: all ranks.
        forecast: predicts the memory of jobs; None where it cannot.

    Attributes:
        unstoppable: a job in a loop that no single rank can leave; cancelling it ends the ranks, which start anew.
    """

    def __init__(
        self, settings: ReplicaSettings, model: ServedModel, mesh: Mesh, forecast: MemoryForecast | None = None
    ) -> None:
        self._line = Client(settings.address, authkey=settings.authkey)
        self._model, self._mesh, self._forecast = model, mesh, forecast
        self._courier = Courier() if settings.sends_files else None
        self._asked: SimpleQueue[ToDesk] = SimpleQueue()
        self._sending = threading.Lock()
        self.unstoppable: str | None = None
        threading.Thread(target=self._read, name="what the server asks for", daemon=True).start()

    def send(self, message: FromRanks) -> None:
        """Sends the server a message, after any new parts of the job's files where it cannot read those itself."""
        with self._sending:
            if self._courier is not None and isinstance(message, JobStepped | JobFinished):
                for part in self._courier.parts(message.id):
                    self._line.send(part)
            self._line.send(message)
            if self._courier is not None and isinstance(message, (*JOB_ENDS, JobReturned)):
                self._courier.forget(message.id)

    def asked(self, patience: float) -> list[ToDesk]:
        """Returns the requests since the last call.

        Args:
            patience: seconds to wait for the first one; 0 returns at once.
        """
        messages: list[ToDesk] = []
        try:
            messages.append(self._asked.get(timeout=patience) if patience else self._asked.get_nowait())
            while True:
                messages.append(self._asked.get_nowait())
        except Empty:
            return messages

    def _read(self) -> None:
        while True:
            try:
                message: ToRanks = self._line.recv()
            except (EOFError, OSError):  # the server has ended, and the ranks end with it
                os._exit(0)
            if isinstance(message, Check):
                self.send(self._checked(message.work))
            elif isinstance(message, Cancel) and message.id == self.unstoppable:
                self.send(JobCancelled(message.id))
                os._exit(1)
            else:
                self._asked.put(Submit(self._taken(message.work)) if isinstance(message, Submit) else message)

    def _checked(self, work: JobWork) -> Checked:
        checked, forecast = check_work(self._model, self._mesh, work), self._forecast
        if checked.error is not None or work.is_session:  # the sizes of a session come with its calls
            return checked
        try:
            if forecast is None or not forecast.knows_sizes:
                check_sizes(self._model, work)
            if forecast is not None:
                forecast.check(work)
        except PartsongError as error:
            return replace(checked, error=error)
        return checked

    def _taken(self, work: JobWork) -> JobWork:
        if self._forecast is not None and not work.is_session:
            work = replace(work, memory=self._forecast.of(work))
        return work if self._courier is None else self._courier.take(work)
