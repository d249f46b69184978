"""Ends a process when the one that started it ends, however that happens."""

from __future__ import annotations

import ctypes
import signal
import sys

__all__ = ["end_with_parent", "outlive_parent"]

#: Linux's option of prctl for the signal that a process gets when the thread that started it ends.
_PARENT_DEATH_SIGNAL = 1


def end_with_parent() -> None:
    """Has Linux kill this process when its parent ends; elsewhere nothing happens."""
    _ask_for(signal.SIGKILL)


def outlive_parent() -> None:
    """Undoes `end_with_parent`."""
    _ask_for(0)


def _ask_for(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)
