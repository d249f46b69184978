"""Starts ``partsong serve`` as a user does, and finds its processes."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from openai import OpenAI
from PIL import Image

from partsong.cli import main

__all__ = ["RunningServer", "pixels", "refused", "running"]

#: Seconds until a server has to be ready, also on a machine with much else to do.
READY = 180.0


class RunningServer:
    """Holds a server in a process of its own.

    Args:
        folder: its ``--folder``.
        *arguments: of ``partsong serve``, without port and folder.
        environment: further variables.
        launcher: what runs the module, instead of Python alone.

    Attributes:
        folder: its ``--folder``.
        url: where it answers.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        launcher: Sequence[str] = (sys.executable,),
    ) -> None:
        command = [*launcher, "-m", "partsong", "serve", "--port", "0", "--folder", str(folder), *arguments]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables)
        self.folder, self.lines = folder, list[str]()
        self.url = ""
        found = threading.Event()

        def read() -> None:
            assert self._process.stderr is not None
            for line in self._process.stderr:
                self.lines.append(line)
                address = re.search(r"at (http://[\d.]+:\d+)", line)
                if address is not None:
                    self.url = address.group(1)
                    found.set()
            found.set()

        threading.Thread(target=read, daemon=True).start()
        assert found.wait(READY), self.lines
        assert self.url, self.lines

    def wait_ready(self) -> None:
        """Waits until all ranks have answered."""
        self.wait(lambda: httpx.get(f"{self.url}/ready").status_code == 200, READY)

    def wait(self, holds: Any, seconds: float = 60.0) -> None:
        """Waits until something holds."""
        end = time.monotonic() + seconds
        pause = threading.Event()
        while not holds():
            assert self._process.poll() is None, self.lines
            assert time.monotonic() < end, (holds, self.lines)
            pause.wait(0.05)

    def client(self, **more: Any) -> OpenAI:
        """Returns the official client."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120.0, **more)

    def json(self, path: str) -> Any:
        """Returns what a path answers."""
        return httpx.get(f"{self.url}{path}").json()

    @property
    def pid(self) -> int:
        """Returns the process of the server itself."""
        return self._process.pid

    def ranks(self) -> list[psutil.Process]:
        """Returns the processes of the ranks."""
        every = psutil.Process(self.pid).children(recursive=True)
        return [process for process in every if _is_rank(process)]

    def stop(self) -> int:
        """Asks it to end and returns its exit code."""
        self._process.terminate()
        return self._process.wait(60)

    def kill(self) -> None:
        """Kills it at once."""
        self._process.kill()
        self._process.wait(60)


@contextmanager
def running(folder: Path, *arguments: str, **more: Any) -> Iterator[RunningServer]:
    """Runs a server for the length of a block, from the moment all ranks are there."""
    server = RunningServer(folder, *arguments, **more)
    try:
        server.wait_ready()
        yield server
    finally:
        if server._process.poll() is None:
            server.kill()


def refused(capfd: Any, *arguments: str) -> str:
    """Runs ``partsong serve`` in this process, which refuses, and returns the one line that says why."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", *arguments])
    out, said = capfd.readouterr()
    assert (ended.value.code, out, said.count("\n")) == (2, "", 1), said
    return said


def pixels(b64: str) -> NDArray[np.int16]:
    """Returns the values of a picture that came as text."""
    with Image.open(io.BytesIO(base64.b64decode(b64))) as picture:
        return np.asarray(picture.convert("RGB"), dtype=np.int16)


def _is_rank(process: psutil.Process) -> bool:
    """Says whether a fork server has started a process: servers start nothing else that way."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return parent is not None and any("multiprocessing.forkserver" in part for part in parent.cmdline())
    return False
