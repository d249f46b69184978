"""Compares two mathematical answers at a time, as the process that `MathChecker` starts.

It reads a line of JSON, ``{"gold": ..., "answer": ...}``, and writes one, ``{"right": ..., "reason": ...}``. It does
not watch the time, because its parent kills it. It bounds its memory, and its processor time in case its parent is
gone. It uses only math-verify's LaTeX reader, which builds formulas from a grammar; the reader of plain expressions
hands text to Python. This file is started by its path and needs nothing else of the package.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Answers until its input ends."""
    memory, seconds = int(sys.argv[1]), float(sys.argv[2])
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    _bound_memory(memory)
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        _write(answers, {"missing": str(error)})
        return

    def read(latex: str) -> list[Any]:
        # Timers of math-verify need signals, which do not work everywhere; the parent keeps the time instead.
        return parse(latex, [LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    _write(answers, {"ready": True})
    for line in sys.stdin:
        _bound_time(seconds)
        _write(answers, _compare(json.loads(line), read, verify))


def _compare(pair: dict[str, str], read: Any, verify: Any) -> dict[str, Any]:
    try:
        # The gold answer comes first: an answer may say more, but not less.
        gold, answer = read(f"${pair['gold']}$"), read(f"\\boxed{{{pair['answer']}}}")
        if not gold or not answer:
            return {"right": None, "reason": "no formula could be read"}
        right = verify(gold, answer, timeout_seconds=None) and not _differ(gold[0], answer[0])
        return {"right": bool(right), "reason": "compared"}
    except MemoryError:
        return {"right": None, "reason": "out of memory"}
    except RecursionError:
        return {"right": None, "reason": "too deep"}
    except Exception as error:  # noqa: BLE001 - a foreign library may raise any error; the pair is then undecided
        return {"right": None, "reason": type(error).__name__}


def _differ(gold: Any, answer: Any) -> bool:
    """Says whether two numbers surely differ, because math-verify takes all tiny numbers for equal."""
    from sympy import Expr, Float

    if not (isinstance(gold, Expr) and isinstance(answer, Expr)) or gold.free_symbols or answer.free_symbols:
        return False
    difference = (gold - answer).evalf(15)
    if not isinstance(difference, Float) or difference._prec <= 1:  # nothing but rounding is left
        return False
    if not (gold.has(Float) or answer.has(Float)):
        return True
    # Decimals count as rounded: 0.333333 is one third.
    return abs(difference) > 0.01 * max(abs(gold.evalf(15)), abs(answer.evalf(15)))


def _bound_memory(memory: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _bound_time(seconds: float) -> None:
    """Makes the system end this process some time after its parent should have done so."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime + 2 * seconds) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _write(answers: Any, reply: dict[str, Any]) -> None:
    answers.write(json.dumps(reply) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
