"""``partsong serve`` as a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path


def _wait(url: str) -> None:
    """Waits until the server listens, which it does a little after it has named its address."""
    pause = threading.Event()
    for _ in range(600):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health").close()
            return
        pause.wait(0.1)
    raise RuntimeError(f"{url} does not listen")


@contextlib.contextmanager
def served(folder: Path, models: Sequence[str], *, nproc: int = 2) -> Iterator[str]:
    """Starts a server on a free port and gives its address; its models may still be loading."""
    command = [sys.executable, "-m", "partsong", "serve", "--nproc", str(nproc), "--port", "0", "--folder", str(folder)]
    command += [word for model in models for word in ("--model", model)]
    environment = {name: value for name, value in os.environ.items() if name != "PARTSONG_API_KEY"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    stream, lines = process.stdout, []
    try:
        for line in stream:
            lines.append(line)
            if found := re.search(r"http://[\d.]+:\d+", line):
                # What it writes later has to be read too, or it would wait for room in the pipe.
                threading.Thread(target=lambda: lines.extend(stream), daemon=True).start()
                _wait(found.group())
                yield found.group()
                return
        raise RuntimeError("the server ended: " + "".join(lines))
    finally:
        process.terminate()
        process.wait(60)
