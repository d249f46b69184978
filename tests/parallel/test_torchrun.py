"""The same program under torchrun: it works, and a killed rank is named on stderr instead of hanging the run."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 90.0


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.parallel.torchrun_worker", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.mark.full
def test_ranks_of_torchrun_meet() -> None:
    done = torchrun("meet")
    assert done.returncode == 0, done.stderr
    assert "ranks 2 met True" in done.stdout


@pytest.mark.full  # what is computed does not depend on who has started the ranks
def test_works_under_torchrun() -> None:
    done = torchrun()
    assert done.returncode == 0, done.stderr
    assert "ranks 2 right True" in done.stdout


@pytest.mark.full  # torchrun ends the run; that a rank of ours is killed and named is in tests/parallel/test_launch.py
def test_a_killed_rank_ends_the_run_and_is_named() -> None:
    start = time.monotonic()
    done = torchrun("1")
    assert done.returncode != 0
    assert time.monotonic() - start < LIMIT
    assert re.search(r"local_rank: 1|rank\s*: 1", done.stderr), done.stderr
    assert "SIGKILL" in done.stderr
