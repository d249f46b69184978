"""Runs ``partsong eval promises`` and prints what was promised beside what was measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from partsong import zoo
from partsong.cli.bounds import check_files
from partsong.cli.ranks import refuse_torchrun
from partsong.cli.suites.options import Promises
from partsong.cli.table import table
from partsong.errors import ArgumentError
from partsong.progress import progress

__all__ = ["evaluate", "summary"]


def evaluate(options: Promises) -> dict[str, Any]:
    """Measures the rows and returns them."""
    refuse_torchrun("partsong eval promises starts its own ranks")
    check_files(options.json)
    if not zoo.MODELS:
        raise ArgumentError(f"promises are measured on small models: {zoo.INSTALL}")
    from partsong.evals.promises.evidence import Effort
    from partsong.evals.promises.suite import chosen, measure_promises

    rows, start = chosen(options.methods), time.perf_counter()
    effort = Effort(problems=options.num, samples=options.samples, rounds=options.rounds, seed=options.seed)
    measured = measure_promises(
        rows,
        effort,
        Path(options.work),
        threads=options.threads or 1,
        progress=lambda left: progress(left, "promises", unit="row"),
    )
    return {
        "command": "eval",
        "suite": "promises",
        "nproc": 1,
        "seed": options.seed,
        "seconds": time.perf_counter() - start,
        "rows": measured,
    }


def summary(result: dict[str, Any]) -> str:
    """Returns a table of promises, and a line on how to read it."""
    columns = ("method", "verdict", "measured")
    shown = [{name: row[name] for name in columns} for row in result["rows"]]
    lines = [dict(zip(columns, columns, strict=True)), *shown]
    return f"{table(lines)}\n95 % intervals (paired bootstrap); of times the smallest and the largest of all rounds"
