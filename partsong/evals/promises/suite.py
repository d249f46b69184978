"""Measures promises one after another; a stopped run goes on where it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from partsong.errors import ArgumentError
from partsong.evals.promises.evidence import Effort, Promise
from partsong.evals.promises.rows import PROMISES
from partsong.evals.reasoning.line_file import LineFile
from partsong.knobs import did_you_mean

__all__ = ["chosen", "measure_promises"]


def chosen(names: Sequence[str]) -> list[Promise]:
    """Returns the rows of some methods, or all of them.

    Args:
        names: methods as the rows name them, or the first word of it; empty for all.

    Raises:
        ArgumentError: no row has such a name.
    """
    by_name = {row.method: row for row in PROMISES}
    for name in names:
        if not any(name in (method, method.split()[0]) for method in by_name):
            raise ArgumentError(f"no promise of {name!r}{did_you_mean(name, by_name)}; there are {', '.join(by_name)}")
    return [row for method, row in by_name.items() if not names or {method, method.split()[0]} & set(names)]


def measure_promises(
    rows: Sequence[Promise],
    effort: Effort,
    work: Path,
    *,
    threads: int = 1,
    progress: Callable[[Sequence[Promise]], Iterable[Promise]] = iter,
) -> list[dict[str, Any]]:
    """Measures rows that the folder does not hold yet.

    Args:
        rows: what to measure.
        effort: how much to spend on a row.
        work: folder of ``findings.jsonl``, a line for each finished row, and of what an unfinished row has computed.
        threads: of torch.
        progress: wraps the rows that are still to be measured, such as with a bar.

    Returns:
        A flat dictionary for each row: ``method paper promise setting value low high measured cost verdict because
        seconds``.

    Raises:
        ArgumentError: the folder belongs to a run with another effort, or partsong-zoo is not installed.
    """
    torch.set_num_threads(threads)
    with LineFile(work / "findings.jsonl", {"promises": 1, **asdict(effort)}, "run of promises") as file:
        kept = {line["method"]: line for line in file.lines}
        for row in progress([row for row in rows if row.method not in kept]):
            begin = time.perf_counter()
            evidence = row.measure(effort, work)
            texts = {name: getattr(row, name) for name in ("method", "paper", "promise", "setting")}
            line = {**texts, **asdict(evidence), "because": row.because, "seconds": time.perf_counter() - begin}
            kept[row.method] = line
            file.append(line)
    return [kept[row.method] for row in rows]
