"""Ends a process when the one that started it ends, however that happens.

Started by its path as a process of its own, this file runs a command for as long as its parent holds the other end of
standard input. When the parent ends, even if it is killed, the system closes its end of the pipe, and the command is
ended with all it has started. So this file needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

__all__ = ["end_with_parent", "guard", "outlive_parent"]

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


def guard(grace: float, command: list[str]) -> int:
    """Runs a command until it ends, or until there is nothing more to read; returns its exit status.

    The command gets `grace` seconds to end by itself before it is killed.
    """
    # This process has only one thread yet, so the child may run Python code before it becomes the command.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent)

    def watch() -> None:
        while os.read(0, 1024):
            pass
        _end(child, grace)

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: _end(child, grace))
    return child.wait()


def _end(child: subprocess.Popen[bytes], grace: float) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
            child.wait(grace)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        return


if __name__ == "__main__":
    sys.exit(guard(float(sys.argv[1]), sys.argv[2:]))
