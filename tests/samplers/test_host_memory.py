"""Memory goes back to the system between the parts of a stream."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator

import pytest

from partsong.samplers.long_video import host_memory
from partsong.samplers.long_video.host_memory import give_back, trimmed

#: Holds one small piece behind every few large ones, so that the C library keeps what lies between.
CHILD = """
import runpy, sys
give_back = runpy.run_path(sys.argv[1])["give_back"]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
pieces = [bytearray(100_000) for _ in range(2000)]
pieces = pieces[::20]
before = resident()
print(give_back(), before - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be told")
def test_what_lies_between_is_given_back() -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000000"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, host_memory.__file__], capture_output=True, text=True, check=True, env=environment
    )
    found, freed = child.stdout.split()
    assert found == "True" and float(freed) > 100


def test_a_stream_that_is_closed_closes_what_it_reads() -> None:
    closed = []

    def parts() -> Generator[int, None, None]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    stream = trimmed(parts())
    assert next(stream) == 1
    stream.close()
    assert closed == [True]
    assert isinstance(give_back(), bool)
