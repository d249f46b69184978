"""Times lint and the default tests, and counts the processes that tests start: ``python benchmarks/suite.py``.

It runs in a fresh clone whose environment `make test` and `make lint` have made, on a machine that does nothing else.
The table has the seconds of tests by folder, set-up included and both workers added, and what they started.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path

ROOT = Path(__file__).resolve().parent.parent
#: Where the workers of a measured run write a line for each test.
_NOTES = "PARTSONG_SUITE_NOTES"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says where to file."""

    out: Path = result_path(__file__)
    """Path of both files without suffix."""
    skip_lint: bool = False
    """Whether to leave `make lint` out."""


class Notes:
    """Notes of every test its seconds and the processes that it started; a plug-in of pytest, one in each worker."""

    def __init__(self, path: Path) -> None:
        self._path, self._started, self._seconds = path, 0, Counter[str]()
        popen, start = subprocess.Popen.__init__, multiprocessing.process.BaseProcess.start

        def counted_popen(this: Any, *given: Any, **named: Any) -> None:
            self._started += 1
            popen(this, *given, **named)

        def counted_start(this: Any) -> None:
            self._started += 1
            start(this)

        subprocess.Popen.__init__ = counted_popen
        multiprocessing.process.BaseProcess.start = counted_start

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Writes a line when a test has been taken down."""
        self._seconds[report.nodeid] += report.duration
        if report.when == "teardown":
            row = [report.nodeid, self._seconds[report.nodeid], self._started]
            self._started = 0
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def pytest_configure(config: Any) -> None:
    """Begins the notes of a worker; pytest calls it, since the measured run names this module as a plug-in."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        config.pluginmanager.register(Notes(Path(os.environ[_NOTES]) / f"{worker}.jsonl"))


def timed(*command: str, **env: str) -> float:
    """Runs a command and returns its seconds.

    Raises:
        CalledProcessError: it failed.
    """
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=os.environ | env, check=True)
    return time.perf_counter() - start


def main(config: Config) -> None:
    """Runs both and files the table."""
    lint = 0.0 if config.skip_lint else timed("make", "lint")
    with tempfile.TemporaryDirectory() as notes:
        test = timed("make", "test", PYTEST_ADDOPTS="-p benchmarks.suite", **{_NOTES: notes})
        tests = [json.loads(line) for path in Path(notes).iterdir() for line in path.read_text().splitlines()]
    folders = {"/".join(name.split("::")[0].split("/")[:2]) for name, *_ in tests}
    rows = [_row(folder, [test for test in tests if test[0].startswith(folder)]) for folder in sorted(folders)]
    rows.sort(key=lambda row: -row["seconds"])
    total = {"make_lint": lint, "make_test": test} | _row("all", tests)
    note = (
        f"`make lint` took {lint:.0f} s and `make test` {test:.0f} s. Its {total['tests']} tests took "
        f"{total['seconds']:.0f} s, both workers added, and started {total['processes']} processes: ranks, servers and "
        f"commands."
    )
    table = markdown_table([*rows[0]], [[*row.values()] for row in rows])
    file_result(config.out, __file__, [total, *rows], "The suite", note, table)


def _row(folder: str, tests: list[list[Any]]) -> dict[str, Any]:
    return {
        "folder": folder,
        "tests": len(tests),
        "seconds": round(sum(seconds for _, seconds, _ in tests), 1),
        "over_5_s": sum(seconds > 5 for _, seconds, _ in tests),
        "processes": sum(started for *_, started in tests),
    }


if __name__ == "__main__":
    main(tyro.cli(Config))
