"""Checks that what the ranks of a server have used is known once they are gone."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from benchmarks.serving.server import Server

#: A rank that works for 0.6 s of a processor and says so.
_RANK = """
import os, sys, time
while time.process_time() < 0.6: pass
print("worked", flush=True)
time.sleep(60)
"""
_PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {_RANK!r}]).wait()"


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_the_work_of_ranks_counts_when_they_are_gone(sign: signal.Signals) -> None:
    server, before = object.__new__(Server), Server.orphaned
    server.process = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    assert server.process.stdout is not None and server.process.stdout.readline() == "worked\n"
    ranks = server.processes()[1:]
    assert server.end(sign) == -sign
    for rank in ranks:
        rank.kill()
    assert 0.55 <= Server.orphaned - before < 1.5  # the system counts hundredths
