r"""Decides whether a model's answer is right: numbers are compared exactly here, formulas in a process of their own.

A verdict is "right", "wrong" or "undecided". Undecided counts as wrong: the comparison took too long, took too much
memory, or could not read the answer. Formulas go to math-verify, which works with a computer algebra system. An answer
as short as ``9^{9^{9}}`` would keep it busy forever. So it runs in processes of its own, each answer has a deadline,
and a process that misses it is killed and replaced. Threads would not work, because its timers are signals, and a
thread cannot be killed.

>>> same_number("0.50", "1/2"), same_number("1/2", "half")
(True, None)
"""

from __future__ import annotations

import atexit
import threading
import time
from dataclasses import dataclass, replace

from partsong.errors import ArgumentError
from partsong.knobs import AboveZero, Count, check_knobs, type_hints
from partsong.reasoning.answers.checking_process import CheckerProcess, CheckingError
from partsong.reasoning.answers.extract import normal_math
from partsong.reasoning.answers.number import read_number
from partsong.reasoning.answers.numerals import PARTED_DIGITS, plain_numerals

__all__ = ["CheckingError", "MathChecker", "Verdict", "same_number", "shared_checker"]

#: Longer answers are not compared; no formula in a textbook is that long.
MAX_ANSWER = 2000


@dataclass(frozen=True, slots=True)
class Verdict:
    """Holds the result of a comparison.

    Attributes:
        right: whether the answer equals the gold one; False where that is undecided.
        decided: whether the comparison came to a result.
        reason: how it was decided, or why not.
        seconds: how long it took.
    """

    right: bool
    decided: bool = True
    reason: str = "compared"
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.right


def same_number(gold: str, answer: str) -> bool | None:
    r"""Returns whether two texts are exactly the same number; None unless both are numbers or arithmetic.

    Units are left out. A percentage has no value here, because 15 % may stand for 15 and for 0.15.

    >>> same_number("1,000", "10^3"), same_number("0.33", "1/3"), same_number("9**9**9", "1")
    (True, False, None)
    """
    if any("%" in text or "percent" in text for text in (gold, answer)):
        return None
    values = read_number(gold), read_number(answer)
    return None if None in values else values[0] == values[1]


class MathChecker:
    r"""Compares answers with gold ones, in a pool of processes that start when the first formula needs them.

    Args:
        workers: most processes.
        seconds: longest time of one comparison.
        memory_mb: megabytes of address space of a process.
        start_seconds: longest time a process may take to start.

    Raises:
        ArgumentError: a number is not positive.

    >>> with MathChecker() as checker:
    ...     checker.check(r"\sqrt{8}", r"2\sqrt{2}").right
    True
    """

    def __init__(
        self, *, workers: Count = 1, seconds: AboveZero = 5.0, memory_mb: Count = 1024, start_seconds: AboveZero = 120.0
    ) -> None:
        limits = {"workers": workers, "seconds": seconds, "memory_mb": memory_mb, "start_seconds": start_seconds}
        check_knobs(type_hints(MathChecker.__init__), limits)
        self.workers, self.seconds, self.start_seconds = workers, seconds, start_seconds
        self.memory = memory_mb * 2**20
        self._idle: list[CheckerProcess] = []
        self._busy: set[CheckerProcess] = set()
        self._seats = threading.BoundedSemaphore(workers)
        self._lock = threading.Lock()
        self._closed = False
        #: Processes that had to be killed so far.
        self.killed = 0

    def __enter__(self) -> MathChecker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; comparisons that still run become undecided."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for process in idle:
                process.kill()
            # The threads that wait for one of these see its end and clean up.
            for process in self._busy:
                process.stop()

    def check(self, gold: str, answer: str | None) -> Verdict:
        r"""Compares an answer with the gold one; may be called from several threads.

        Args:
            gold: the gold answer in LaTeX, without dollar signs or a box. It comes first, because the comparison is not
                symmetric.
            answer: the model's answer in the same form; None, no answer, is wrong.

        Raises:
            CheckingError: math-verify is needed and not installed, or its process does not start.
            ArgumentError: the checker was closed.
        """
        begin = time.monotonic()
        if answer is None:
            return Verdict(False, reason="no answer")
        if len(answer) > MAX_ANSWER or len(gold) > MAX_ANSWER:
            return Verdict(False, decided=False, reason=f"longer than {MAX_ANSWER} characters")
        if normal_math(gold) == normal_math(answer):
            return Verdict(True, reason="same text")
        same = same_number(gold, answer)
        if same is not None:
            return Verdict(same, reason="same number" if same else "another number")
        formulas = [plain_numerals(gold), plain_numerals(answer)]
        if any(map(PARTED_DIGITS.search, formulas)):  # math-verify would multiply them
            return Verdict(False, decided=False, reason="blanks between digits: one number or two?")
        verdict = self._ask_process(*formulas)
        return replace(verdict, seconds=time.monotonic() - begin)

    def _ask_process(self, gold: str, answer: str) -> Verdict:
        with self._seats:
            process = self._take()
            until = time.monotonic() + self.seconds
            reply = process.ask(gold, answer, until)
            if reply is None:
                late = time.monotonic() >= until
                self._drop(process)
                reason = f"took longer than {self.seconds:g} seconds" if late else "the process died"
                return Verdict(False, decided=False, reason=reason)
            if reply["right"] is None and reply["reason"] == "out of memory":
                self._drop(process)
            else:
                self._put_back(process)
            return Verdict(bool(reply["right"]), decided=reply["right"] is not None, reason=reply["reason"])

    def _take(self) -> CheckerProcess:
        with self._lock:
            if self._closed:
                raise ArgumentError("the checker was closed; make another one")
            is_ready = bool(self._idle)
            process = self._idle.pop() if is_ready else CheckerProcess(self.memory, self.seconds)
            self._busy.add(process)
        try:
            if not is_ready:
                process.wait_until_ready(self.start_seconds)
        except CheckingError:
            self._drop(process, count=False)
            raise
        return process

    def _put_back(self, process: CheckerProcess) -> None:
        with self._lock:
            self._busy.discard(process)
            if not self._closed:
                self._idle.append(process)

    def _drop(self, process: CheckerProcess, *, count: bool = True) -> None:
        process.kill()
        with self._lock:
            self._busy.discard(process)
            self.killed += count


_shared: list[MathChecker] = []


def shared_checker() -> MathChecker:
    """Returns the checker that all callers without one of their own share; it is closed when Python ends."""
    if not _shared:
        _shared.append(MathChecker())
        atexit.register(_shared[0].close)
    return _shared[0]
