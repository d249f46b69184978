"""Records what a run computed, moved and spent, as append-only JSON lines.

A `Ledger` is active inside its ``with`` block. Code called there reports to it through `count`, which costs one
look-up if no ledger is active. One line is written per rank and step, in one format for images, text and
reasoning.

Example:
    >>> with Ledger() as ledger:
    ...     count(forwards=1, bytes_sent=64, messages=1)
    ...     ledger.step()
    >>> ledger.summary()["bytes_sent"]
    64
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextvars import ContextVar, Token
from pathlib import Path
from types import TracebackType
from typing import Any

from partsong.errors import ArgumentError

__all__ = ["FIELDS", "Ledger", "active", "count"]

#: Numbers every record carries (seconds are wall-clock, bytes are payload bytes of this rank).
FIELDS = (
    "forwards",
    "flops",
    "bytes_sent",
    "bytes_received",
    "messages",
    "seconds_compute",
    "seconds_waiting",
    "tokens",
)

Amount = float | Callable[[], float]
#: An amount by name that is read later.
Late = tuple[str, Callable[[], float]]
#: How many steps a device may be behind its host before a record waits for it.
_BEHIND = 2

_ACTIVE: ContextVar[Ledger | None] = ContextVar("partsong_ledger", default=None)


def active() -> Ledger | None:
    """Returns the ledger of the innermost ``with Ledger()`` block, or None."""
    return _ACTIVE.get()


def count(**amounts: Amount) -> None:
    """Adds amounts to the open record of the active ledger; does nothing when none is active.

    Args:
        **amounts: numbers by name, out of `FIELDS`. A function is called for its number two steps later, so that no
            step waits for what a device has not computed yet.

    Raises:
        ArgumentError: a name is not in `FIELDS`.
    """
    ledger = _ACTIVE.get()
    if ledger is not None:
        ledger.count(**amounts)


class Ledger:
    """Collects the records of this process, as a context manager.

    Args:
        path: file to append JSON lines to; several ranks may share it (a line is written in one call). None keeps
            the records in memory only.
        rank: number written into each record; default is the environment's ``RANK``, else 0.
        flops: whether models under a plan count their floating-point operations, once per set of shapes.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, rank: int | None = None, flops: bool = True
    ) -> None:
        self.path = None if path is None else Path(path)
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.flops = flops
        self.records: list[dict[str, Any]] = []
        #: Amounts of the open record that a device has not reached yet, by name.
        self.late: list[Late] = []
        self._open: dict[str, float] = dict.fromkeys(FIELDS, 0)
        self._unwritten: list[tuple[dict[str, Any], list[Late]]] = []
        self._token: Token[Ledger | None] | None = None

    def __enter__(self) -> Ledger:
        if self._token is not None:
            raise ArgumentError("this Ledger is already active; make a second Ledger for a nested block")
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._token = _ACTIVE.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:  # a device that has failed tells no times, and would hide the error
            self.late.clear()
            self._unwritten = [(record, []) for record, _ in self._unwritten]
        if any(self._open.values()) or self.late:
            self.step(note="after the last step")
        self._write(keep=0)
        assert self._token is not None
        _ACTIVE.reset(self._token)
        self._token = None

    def count(self, **amounts: Amount) -> None:
        """Adds amounts, by names out of `FIELDS`, to the open record."""
        for name, amount in amounts.items():
            if name not in self._open:
                raise ArgumentError(f"a ledger does not count {name!r}; it counts {', '.join(FIELDS)}")
            if callable(amount):
                self.late.append((name, amount))
            else:
                self._open[name] += amount

    def open_amount(self, name: str) -> float:
        """Returns the amount counted under `name` since the last step was closed."""
        return self._open[name]

    def step(self, **labels: Any) -> None:
        """Closes the open record under the next step number, writes it out and opens a new one.

        Args:
            **labels: further JSON values to keep with the record (for example ``phase="vae"``).
        """
        record = {"rank": self.rank, "step": len(self.records), **self._open, **labels}
        self.records.append(record)
        self._unwritten.append((record, self.late))
        self._open, self.late = dict.fromkeys(FIELDS, 0), []
        self._write(keep=_BEHIND)

    def _write(self, keep: int) -> None:
        """Completes and writes records in their order; the last few may wait for amounts that come late."""
        while self._unwritten and (len(self._unwritten) > keep or not self._unwritten[0][1]):
            record, late = self._unwritten.pop(0)
            for name, read in late:
                record[name] += read()
            self._append(record)

    def _append(self, record: dict[str, Any]) -> None:
        if self.path is not None:
            line = (json.dumps(record) + "\n").encode()
            # O_APPEND makes one write of a line atomic on a local file system, so ranks can share the file.
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)

    def summary(self) -> dict[str, float]:
        """Adds up this process's records, plus ``steps``."""
        self._write(keep=0)
        for name, read in self.late:
            self._open[name] += read()
        self.late.clear()
        totals: dict[str, float] = {"steps": len(self.records)}
        for name in FIELDS:
            totals[name] = sum(record[name] for record in self.records) + self._open[name]
        return totals
