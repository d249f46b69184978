"""Counts the time in which a rank computes and does not wait for others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from partsong import ledger
from partsong.accelerator import Stopwatch

__all__ = ["computing"]


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """Counts the time inside into the active ledger, without that in which this rank waited for messages."""
    active = ledger.active()
    if active is None:
        yield
        return
    clock, waited, late = Stopwatch(device), active.open_amount("seconds_waiting"), len(active.late)
    yield
    taken, waited = clock.stop(), active.open_amount("seconds_waiting") - waited
    if callable(taken):
        whole, reads = taken, [read for name, read in active.late[late:] if name == "seconds_waiting"]
        active.count(seconds_compute=lambda: whole() - waited - sum(read() for read in reads))
    else:
        active.count(seconds_compute=taken - waited)
