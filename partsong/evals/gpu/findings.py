"""Describes what a stage runs on, and what it finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["Equipment", "Finding", "Trial", "at_least", "at_most", "holds", "skipped", "stated"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Equipment:
    """Says what a run has.

    Attributes:
        gpus: how many GPUs; 0 is a run on the CPU, at tiny sizes.
        name: of the first GPU, empty without one.
    """

    gpus: int = 0
    name: str = ""

    @property
    def device(self) -> str:
        """Returns the torch device type."""
        return "cuda" if self.gpus else "cpu"

    def pick(self, large: _T, tiny: _T) -> _T:
        """Returns the first on a GPU and the second on a CPU."""
        return large if self.gpus else tiny


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds one row of the result.

    Attributes:
        check: what was looked at.
        value: what was found.
        expected: in words; empty where there is nothing to hold the value to.
        ok: whether they agree; None where the value was only measured, or the check was skipped.
    """

    check: str
    value: Any
    expected: str = ""
    ok: bool | None = None

    def row(self, stage: str) -> dict[str, Any]:
        """Returns the row as JSON has it, which knows no infinity."""
        is_odd = isinstance(self.value, float) and not math.isfinite(self.value)
        value = str(self.value) if is_odd else self.value
        return {"stage": stage, "check": self.check, "value": value, "expected": self.expected, "ok": self.ok}


@dataclass(frozen=True, slots=True)
class Trial:
    """Describes one stage.

    Attributes:
        name: what chooses it.
        seconds: its limit.
        run: yields findings; defined at the top level of a module, since it runs in a process of its own.
        gpus: how many it needs; with fewer it is skipped. A stage that needs none has a form for CPUs.
    """

    name: str
    seconds: float
    run: Callable[[Equipment], Iterator[Finding]]
    gpus: int = 0


def at_most(check: str, value: float, bound: float | None) -> Finding:
    """Expects a value up to a bound, and not NaN; None is no bound."""
    return stated(check, value) if bound is None else Finding(check, value, f"<= {bound:g}", bool(value <= bound))


def at_least(check: str, value: float, bound: float | None) -> Finding:
    """Expects a value from a bound on; None is no bound."""
    return stated(check, value) if bound is None else Finding(check, value, f">= {bound:g}", bool(value >= bound))


def holds(check: str, ok: bool, value: Any, expected: str) -> Finding:
    """States whether something holds."""
    return Finding(check, value, expected, ok)


def stated(check: str, value: Any) -> Finding:
    """Tells a value that nothing is expected of."""
    return Finding(check, value)


def skipped(check: str, why: str) -> Finding:
    """Says why a check was left out."""
    return Finding(check, f"skipped: {why}")
