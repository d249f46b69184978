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

_ACTIVE: ContextVar[Ledger | None] = ContextVar("partsong_ledger", default=None)


def active() -> Ledger | None:
    """Returns the ledger of the innermost ``with Ledger()`` block, or None."""
    return _ACTIVE.get()


def count(**amounts: float) -> None:
    """Adds amounts to the open record of the active ledger; does nothing when none is active.

    Args:
        **amounts: numbers by name, out of `FIELDS`.

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
        self._open: dict[str, float] = dict.fromkeys(FIELDS, 0)
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
        if any(self._open.values()):
            self.step(note="after the last step")
        assert self._token is not None
        _ACTIVE.reset(self._token)
        self._token = None

    def count(self, **amounts: float) -> None:
        """Adds amounts, by names out of `FIELDS`, to the open record."""
        for name, amount in amounts.items():
            if name not in self._open:
                raise ArgumentError(f"a ledger does not count {name!r}; it counts {', '.join(FIELDS)}")
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
        self._open = dict.fromkeys(FIELDS, 0)
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
        totals: dict[str, float] = {"steps": len(self.records)}
        for name in FIELDS:
            totals[name] = sum(record[name] for record in self.records) + self._open[name]
        return totals
