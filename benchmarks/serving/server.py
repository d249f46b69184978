"""Runs a server for the scripts of this folder, and asks it for pictures."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx
import openai
import psutil

from partsong.jobs.load import LoadWatch

__all__ = ["PROMPT", "Server", "ServerWatch"]

PROMPT = "a red circle left of a blue square"


class Server:
    """Runs a server in a process of its own, and starts it again in the same folder.

    Attributes:
        orphaned: processor seconds of the ranks of all servers that have ended; the system counts them for nobody,
            since ranks outlive the server that started them by a moment.
    """

    orphaned: ClassVar[float] = 0.0

    def __init__(self, folder: Path, nproc: int, more: Sequence[str] = ()) -> None:
        self.folder, self.nproc, self.more = folder, nproc, more
        self.begin()

    def begin(self) -> None:
        """Starts it and waits until it is ready."""
        command = [sys.executable, "-m", "partsong", "serve", "--model", "shapes", "--nproc", str(self.nproc)]
        command += ["--port", "0", "--folder", str(self.folder), "--max-waiting", "1000", *self.more]
        begin = time.perf_counter()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = ""
        while "http://" not in line:
            line = self.process.stderr.readline()
            assert line, "the server ended"
        self.url = re.search(r"http://[\d.]+:\d+", line).group(0)  # type: ignore[union-attr]
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    break
            time.sleep(0.05)
        self.start_seconds = time.perf_counter() - begin
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)

    def processes(self) -> list[psutil.Process]:
        """Returns the server and its ranks."""
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def ranks(self) -> list[psutil.Process]:
        """Returns the ranks."""
        ranks = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                if parent is not None and any("multiprocessing.forkserver" in part for part in parent.cmdline()):
                    ranks.append(process)
        return ranks

    def draw(self, seed: int, **more: Any) -> float:
        """Asks for a picture and returns the seconds."""
        begin = time.perf_counter()
        size = more.pop("size", "64x64")
        self.client.images.generate(model="shapes", prompt=PROMPT, size=size, extra_body={"seed": seed, **more})
        return time.perf_counter() - begin

    def end(self, sign: int = signal.SIGTERM, seconds: float = 120.0) -> int:
        """Ends it, and returns its exit code."""
        used = self._used_by_ranks()
        self.process.send_signal(sign)
        until = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < until, f"the server did not end within {seconds:g} s"
            used = max(used, self._used_by_ranks())
            time.sleep(0.02)
        Server.orphaned += used
        return self.process.returncode

    def _used_by_ranks(self) -> float:
        used = 0.0
        with contextlib.suppress(psutil.Error):
            for process in self.processes()[1:]:
                used += sum(process.cpu_times()[:4])
        return used


class ServerWatch(LoadWatch):
    """Counts the ranks of servers that have ended since it began as our own load, and not as that of others."""

    def __init__(self) -> None:
        super().__init__()
        self._orphaned = Server.orphaned

    def of_others(self, beside: float = 0.0) -> float:
        """Returns the share of all cores that others took; see `LoadWatch`."""
        return super().of_others(beside + Server.orphaned - self._orphaned)
