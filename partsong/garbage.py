"""Leaves garbage collection out of a process's imports: what they make stays, and searching it takes a fifth longer."""

from __future__ import annotations

import gc

__all__ = ["collect_again", "collect_later"]


def collect_later() -> None:
    """Turns garbage collection off until `collect_again`; only the main program may do this, before its imports."""
    gc.disable()


def collect_again() -> None:
    """Turns garbage collection on, if it is off, and has it leave out what is there already."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
