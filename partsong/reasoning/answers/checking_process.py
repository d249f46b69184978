"""Runs one process that compares answers and can be killed at any moment."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from partsong.errors import PartsongError

__all__ = ["CheckerProcess", "CheckingError"]

_FILE = Path(__file__).with_name("checking_worker.py")
#: Longest line of an answer, in bytes.
_MAX_LINE = 10_000


class CheckingError(PartsongError, RuntimeError):
    """Says that the checking process cannot be started: a package is missing, or it dies at once."""


class CheckerProcess:
    """Runs a `checking_worker`.

    It is a fresh interpreter, not a fork: no thread, lock or model of this process is copied into it, and the caller's
    main module is not run again. Only text goes back and forth.

    It may use `memory` bytes of address space. If one comparison takes twice as long as `seconds`, the system ends it
    even if this process is gone.
    """

    def __init__(self, memory: int, seconds: float) -> None:
        command = [sys.executable, "-P", str(_FILE), str(memory), str(seconds)]
        # One thread of linear algebra, because further threads would use up the address space.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._begun = b""
        os.set_blocking(self._in.fileno(), False)
        os.set_blocking(self._out.fileno(), False)

    @property
    def pid(self) -> int:
        """Returns the process id."""
        return self._process.pid

    def wait_until_ready(self, seconds: float) -> None:
        """Waits until it has loaded what it needs.

        Raises:
            CheckingError: math-verify is not installed, or the process did not start.
        """
        reply = self.answer(time.monotonic() + seconds)
        if reply is not None and reply.get("ready"):
            return
        self.kill()
        if reply is not None and "missing" in reply:
            raise CheckingError(
                f"comparing formulas needs math-verify ({reply['missing']}); install it with: "
                "pip install 'partsong[reasoning]'"
            )
        raise CheckingError(f"the process that compares formulas did not start within {seconds:g} seconds")

    def ask(self, gold: str, answer: str, until: float) -> dict[str, Any] | None:
        """Compares two answers; returns None if the process died or `until` passed first, and then has to be killed."""
        line = json.dumps({"gold": gold, "answer": answer}).encode() + b"\n"
        with selectors.DefaultSelector() as ready:
            ready.register(self._in, selectors.EVENT_WRITE)
            while line:
                left = until - time.monotonic()
                if left <= 0 or not ready.select(left):
                    return None
                try:
                    line = line[os.write(self._in.fileno(), line) :]
                except BlockingIOError:
                    continue
                except OSError:
                    return None
        return self.answer(until)

    def answer(self, until: float) -> dict[str, Any] | None:
        """Returns the next line it writes; None if it died or the time `until`, of `time.monotonic`, came first."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._out, selectors.EVENT_READ)
            while b"\n" not in self._begun:
                left = until - time.monotonic()
                if left <= 0 or not ready.select(left):
                    return None
                part = os.read(self._out.fileno(), 4096)
                if not part or len(self._begun) > _MAX_LINE:
                    return None
                self._begun += part
        line, _, self._begun = self._begun.partition(b"\n")
        return json.loads(line)

    def stop(self) -> None:
        """Ends the process from a thread other than the waiting one, which then calls `kill`."""
        self._process.kill()

    def kill(self) -> None:
        """Ends the process at once and frees its resources."""
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()
