"""Knows how long each file of tests takes, so that long ones begin first and none grows unseen.

``pytest --write-seconds`` on a quiet machine files the seconds of a whole run in ``file_seconds.json``. A run of the
whole suite prints its slowest tests, and fails where a file takes more than its share of the run and `REASONS` does not
say why. Shares, because the seconds of another machine are others.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests import covering

__all__ = ["REASONS", "Watch", "by_scope", "file_of", "known", "over_budget", "scope_of", "shard_of"]

_FILE = Path(__file__).with_suffix(".json")
#: What a file takes that no run has measured yet.
_NEW = 3.0

#: The share of a whole run that a file may take without a reason; twice what the longest usual ones take.
SHARE = 0.04

#: Files that may take more, each with its share and the reason.
REASONS: dict[str, tuple[float, str]] = {
    "tests/parallel/test_unet.py": (0.08, "eleven UNets, each cut into rows by several strategies on several ranks"),
    "tests/parallel/test_launch.py": (0.07, "it waits until ranks that died or hang are noticed"),
    "tests/pipelines/test_every_pipeline.py": (0.07, "every pipeline of diffusers, under every way to cut its model"),
    "tests/test_docs.py": (0.06, "every example of every page runs as it is printed"),
    "tests/serving/test_denoise.py": (0.07, "the living server starts in it"),
}

#: Files of tests/serving that share a living server, which takes seconds to start: one process runs them all.
LIVING = {f"tests/serving/test_{name}.py" for name in ("denoise", "edits", "faults", "page_live", "pictures")}

#: Files so long that every shard of the full suite runs a part of them, as `covering.dealt` deals it out.
IN_EVERY_SHARD = {"tests/pipelines/test_every_pipeline.py"}

#: How many of the slowest tests a run prints, and the seconds from which one has to be marked slow.
SLOWEST, LONG = 20, 5.0
#: Below this many seconds a run is of a few files, whose shares say nothing.
WHOLE = 240.0


def file_of(nodeid: str) -> str:
    """Returns the file of a test.

    >>> file_of("tests/test_cli.py::test_help[image]")
    'tests/test_cli.py'
    """
    return nodeid.split("::")[0]


def scope_of(file: str) -> str:
    """Returns what a process runs as a whole with a file: mostly the file alone."""
    return "tests/serving" if file in LIVING else file


def by_scope(seconds: Mapping[str, float]) -> dict[str, float]:
    """Adds up the seconds of files that one process runs together.

    >>> by_scope({"tests/serving/test_edits.py": 3.0, "tests/serving/test_faults.py": 4.0, "tests/test_cli.py": 5.0})
    {'tests/serving': 7.0, 'tests/test_cli.py': 5.0}
    """
    together: Counter[str] = Counter()
    for file, took in seconds.items():
        together[scope_of(file)] += took
    return dict(together)


def known(files: Iterable[str]) -> dict[str, float]:
    """Returns the seconds that each file took when a run of this tier was last filed."""
    filed = json.loads(_FILE.read_text(encoding="utf-8"))["full" if covering.FULL else "default"]
    return {file: filed.get(file, _NEW) for file in files}


def over_budget(seconds: Mapping[str, float], reasons: Mapping[str, tuple[float, str]] = REASONS) -> list[str]:
    """Says which files take more than their share of a run, one line each; none in a run of a few files.

    >>> over_budget({"tests/a.py": 290.0, "tests/b.py": 10.0}, {"tests/b.py": (0.01, "it waits for a server")})
    ['tests/a.py took 96.7 % of the run and may take 4.0 %', 'tests/b.py took 3.3 % of the run and may take 1.0 %']
    """
    whole = sum(seconds.values())
    if whole < WHOLE:
        return []
    allowed = {file: reasons.get(file, (SHARE, ""))[0] for file in seconds}
    return [
        f"{file} took {100 * took / whole:.1f} % of the run and may take {100 * allowed[file]:.1f} %"
        for file, took in seconds.items()
        if took > allowed[file] * whole
    ]


def shard_of(files: Mapping[str, float], count: int) -> dict[str, int]:
    """Deals files out to shards 0 to `count` - 1, the longest first and each to the emptiest shard.

    >>> shard_of({"a": 5.0, "b": 3.0, "c": 2.0}, 2)
    {'a': 0, 'b': 1, 'c': 1}
    """
    loads, places = [0.0] * count, {}
    for file in sorted(files, key=lambda file: (-files[file], file)):
        places[file] = min(range(count), key=lambda shard: (loads[shard], shard))
        loads[places[file]] += files[file]
    return places


class Watch:
    """Adds up seconds by test and by file, prints the slowest, and fails a run whose files outgrow their shares."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tests: Counter[str] = Counter()
        self._marked: set[str] = set()
        self._over: list[str] = []

    @property
    def _files(self) -> dict[str, float]:
        files: Counter[str] = Counter()
        for nodeid, seconds in self._tests.items():
            files[file_of(nodeid)] += seconds
        return dict(files)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts set-up and teardown, too: a launch that a file shares is in the set-up of its first test."""
        self._tests[report.nodeid] += report.duration
        if "slow" in report.keywords:
            self._marked.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fails a run that passed otherwise."""
        self._over = [] if covering.FULL else over_budget(self._files)
        if self._over and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._config.getoption("write_seconds"):
            filed = json.loads(_FILE.read_text(encoding="utf-8"))
            tier = filed["full" if covering.FULL else "default"]
            tier |= {file: round(seconds, 1) for file, seconds in self._files.items()}
            _FILE.write_text(json.dumps(filed, indent=0, sort_keys=True) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the slowest tests, and the files that take more than their share."""
        if sum(self._tests.values()) < WHOLE:
            return
        terminalreporter.section(f"slowest {SLOWEST} tests")
        for nodeid, seconds in self._tests.most_common(SLOWEST):
            is_known = covering.FULL or seconds < LONG or nodeid in self._marked
            terminalreporter.line(f"{seconds:6.1f} s  {nodeid}" + ("" if is_known else ": mark it slow, or split it"))
        for line in self._over:
            terminalreporter.line(f"{line}; make it shorter, or say why in tests/file_seconds.py", red=True)
