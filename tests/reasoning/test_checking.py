"""Verdicts, and processes that hang, grow, die or are missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from partsong.errors import ArgumentError
from partsong.reasoning.answers import checking_process
from partsong.reasoning.answers.checking import CheckingError, MathChecker, same_number
from tests import covering

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def checker() -> Iterator[MathChecker]:
    with MathChecker(seconds=3.0, memory_mb=700) as new:
        yield new


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def pids(checker: MathChecker) -> list[int]:
    return [process.pid for process in checker._idle]


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        *[(r"11\sqrt2", r"\sqrt{242}", True), (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", True)],
        *[("p - q", "-q + p", True), (r"\cot x", r"\frac{\cos x}{\sin x}", True), ("3, 5, 7", "7,5,3", True)],
        *[(r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", True), ("(3,4)", "(4,3)", False), ("x^2", "x^3", False)],
        *[(r"2\sqrt{2}", "2.83", False), (r"\frac{1}{2}", "0.5", True), ("1,000", "1000.0", True), ("3", "4", False)],
        *[("0.15", r"15\%", True), (r"\text{Evelyn}", "Evelyn", True), (r"90^\circ", "90", True)],
        *[("22/3", "2 2/3", False), ("8/3", "2 2/3", True), ("12", "1 2", False), ("1e3", "1000", True)],
        *[(r"\frac{1}{2004!}", r"\frac{1}{2006!}", False), (r"\sqrt2\cdot10^{-20}", r"\sqrt3\cdot10^{-20}", False)],
        *[
            ("0", r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}", True),
            ("(8/3, x)", "(2 2/3, x)", True),
            ("x+12", "x+1 2", False),
        ],
        *[
            ("5", r"5\text{ million}", False),
            ("10000", r"10\,000", True),
            ("9.5", "9{,}5", True),
            ("1234", "1, 234", False),
        ],
        *[("-5", "\u20135", True), (r"12", r"12 \text{ cm}^2", True), ("144", r"12 \text{ cm}^2", False)],
        *[("3", r"__import__('os').abort()", False), ("3", "", False), ("3", "}{$$\n\\", False)],
    ],
)
def test_verdicts(checker: MathChecker, gold: str, answer: str, right: bool) -> None:
    assert checker.check(gold, answer).right is right


def test_the_gold_answer_comes_first(checker: MathChecker) -> None:
    """A chain of inequalities as gold accepts an interval; the other way round is not the same question."""
    assert checker.check(r"1\le x\le 2", "[1,2]").right
    assert not checker.check("[1,2]", r"1\le x\le 2").right


def test_numbers_need_no_process() -> None:
    with MathChecker() as fresh:
        assert fresh.check("1/2", "0.50").right and fresh.check("10^3", "1,000").right
        assert not fresh.check("0.33", "1/3").right and not fresh.check("18", None).right
        assert fresh.check(r"\sqrt{2}", r" \sqrt{2}. ").right
        assert pids(fresh) == []


def test_what_hangs_is_killed_in_time_and_replaced() -> None:
    with MathChecker(seconds=0.7, memory_mb=700) as fresh:
        fresh.seconds = 10.0
        assert fresh.check("p - q", "-q + p").right
        fresh.seconds = 0.7
        (before,) = pids(fresh)
        for killed, answer in enumerate(("9^{9^9}", r"2^{2^{40}}")[: 2 if covering.FULL else 1], 1):
            begin = time.monotonic()
            verdict = fresh.check("3", answer)
            assert (verdict.right, verdict.decided, fresh.killed) == (False, False, killed)
            assert "longer than 0.7 seconds" in verdict.reason and time.monotonic() - begin - verdict.seconds < 0.5
            assert gone(before)
        assert verdict.seconds < 60
        fresh.seconds = 10.0
        assert fresh.check("p - q", "-q + p").right


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="reads /proc")
def test_memory_and_processor_time_are_bounded(checker: MathChecker) -> None:
    assert checker.check("p - q", "-q + p").right
    limits = Path(f"/proc/{pids(checker)[0]}/limits").read_text().splitlines()
    bound = {line[:26].strip(): line[26:].split()[0] for line in limits}
    assert int(bound["Max address space"]) == 700 * 2**20
    assert int(bound["Max cpu time"]) < 60  # an orphan ends by itself


def test_a_process_that_was_killed_from_outside_is_replaced() -> None:
    with MathChecker(seconds=5.0) as fresh:
        assert fresh.check("p - q", "-q + p").right
        (pid,) = pids(fresh)
        os.kill(pid, signal.SIGKILL)
        verdict = fresh.check("p - q", "q")
        assert (verdict.decided, verdict.reason) == (False, "the process died")
        assert fresh.check("p - q", "-q + p").right


@pytest.mark.full
def test_long_and_deep_answers_end(checker: MathChecker) -> None:
    assert checker.check("x", "9" * 1_000_000).reason == "longer than 2000 characters"
    deep = ("(" * 1900, r"\frac{" * 300)[: 2 if covering.FULL else 1]
    for answer in (*deep, "\x00" * 100, "\ud800", "٣" * 100):
        begin = time.monotonic()
        assert not checker.check("x", answer).right
        assert time.monotonic() - begin < 30  # a replacement may have to start


def test_many_at_once_and_threads() -> None:
    pairs: list[tuple[str, str | None]] = [("p - q", "-q + p"), ("x^2", "x^3"), ("p - q", "-q + p"), ("3", None)]
    with MathChecker(workers=2, seconds=5.0) as fresh:
        assert [fresh.check(*pair).right for pair in pairs] == [True, False, True, False]
        assert len(pids(fresh)) <= 2
        rights: list[bool] = []
        threads = [threading.Thread(target=lambda: rights.append(fresh.check("a+b", "b+a").right)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rights == [True] * 4
        left = pids(fresh)
    assert all(map(gone, left))
    with pytest.raises(ArgumentError, match="closed"):
        fresh.check("p - q", "-q + p")


def test_closing_ends_a_check_under_way() -> None:
    fresh, verdicts = MathChecker(seconds=60.0), []
    assert fresh.check("p - q", "-q + p").right
    thread = threading.Thread(target=lambda: verdicts.append(fresh.check("3", "9^{9^{9^9}}")))
    thread.start()
    while not fresh._busy:
        thread.join(0.01)
    fresh.close()
    thread.join(20)
    assert verdicts and not verdicts[0].decided


def test_nothing_is_left_behind() -> None:
    """Python ends without a word, and so do the processes of the shared checker."""
    code = (
        "from partsong.reasoning.answers.checking import shared_checker as s\n"
        "assert s() is s() and s().check('p - q', '-q + p')\nprint(s()._idle[0].pid)"
    )
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert gone(int(ended.stdout))


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"workers": 0}, {"seconds": 0.0}, {"memory_mb": True}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            MathChecker(**options)
    monkeypatch.setattr(checking_process, "_FILE", checking_process._FILE.with_name("no_such_file.py"))
    with MathChecker() as fresh, pytest.raises(CheckingError, match="did not start"):
        fresh.check("p - q", "-q + p")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')")
    with MathChecker() as fresh, pytest.raises(CheckingError, match=r"pip install 'partsong\[reasoning\]'"):
        fresh.check("p - q", "-q + p")


def test_importing_loads_neither_sympy_nor_torch() -> None:
    code = (
        "import sys; from partsong.evals.reasoning import datasets, pool_suite, pareto, suite\n"
        "from partsong.evals.reasoning.tasks import TASKS; TASKS['sudoku'](1)\n"
        "raise SystemExit(any(name in sys.modules for name in ('sympy', 'torch', 'math_verify', 'openai')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("gold", "answer", "same"), [("1/3", "2/6", True), ("2", "x", None), ("9**9**9", "9**9**9", None)]
)
def test_same_number(gold: str, answer: str, same: bool | None) -> None:
    assert same_number(gold, answer) is same
