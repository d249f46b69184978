"""Talks to the server for a group: only its first rank has an office."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Client
from queue import Empty, SimpleQueue

from partsong.parallel import Mesh
from partsong.serving.messages import Cancel, Check, FromRanks, JobCancelled, Stop, Submit, ToRanks
from partsong.serving.ranks.served_model import ServedModel, check_work
from partsong.serving.ranks.settings import GroupSettings

__all__ = ["Office"]


class Office:
    """Reads what the server asks for in a thread of its own, and sends what becomes of it.

    Args:
        settings: where the server is found.
        model: answers whether a job could be carried out.
        mesh: all ranks.

    Attributes:
        unstoppable: a job in a loop that no rank can leave alone; cancelling it ends the ranks, which start anew.
    """

    def __init__(self, settings: GroupSettings, model: ServedModel, mesh: Mesh) -> None:
        self._line = Client(settings.address, authkey=settings.authkey)
        self._model, self._mesh = model, mesh
        self._asked: SimpleQueue[Submit | Cancel | Stop] = SimpleQueue()
        self._sending = threading.Lock()
        self.unstoppable: str | None = None
        threading.Thread(target=self._read, name="what the server asks for", daemon=True).start()

    def send(self, message: FromRanks) -> None:
        """Tells the server something."""
        with self._sending:
            self._line.send(message)

    def asked(self, patience: float) -> list[Submit | Cancel | Stop]:
        """Returns what was asked for since the last time.

        Args:
            patience: how long to wait for the first, in seconds; 0 returns at once.
        """
        messages: list[Submit | Cancel | Stop] = []
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
                self.send(check_work(self._model, self._mesh, message.work))
            elif isinstance(message, Cancel) and message.id == self.unstoppable:
                self.send(JobCancelled(message.id))
                os._exit(1)
            else:
                self._asked.put(message)
