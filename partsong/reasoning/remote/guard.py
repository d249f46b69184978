"""Runs a command for as long as its parent holds the other end of standard input, so no child outlives its parent.

It is started by its path as a process of its own, so it needs nothing but the standard library. When the parent ends,
even if it is killed, the system closes its end of the pipe, and the command is ended with all it has started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Asks the kernel, in the child, to kill the command if this guard is killed itself (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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


def main(grace: float, command: list[str]) -> int:
    """Runs a command until it ends, or until there is nothing more to read; returns its exit status.

    The command gets `grace` seconds to end by itself before it is killed.
    """
    # The guard has only one thread here, so the child may run Python code before it becomes the command.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent)

    def watch() -> None:
        while os.read(0, 1024):
            pass
        _end(child, grace)

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: _end(child, grace))
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
