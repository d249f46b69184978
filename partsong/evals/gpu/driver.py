"""Runs stages one after the other, each in a process of its own, and writes what they found after every one."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError
from partsong.evals.gpu.findings import Equipment, Finding, Trial, skipped
from partsong.foreign_messages import hide_if_parent_does
from partsong.fork_server import context_with
from partsong.outputs import check_writable, write_json

__all__ = ["chosen", "run", "summary"]

logger = logging.getLogger(__name__)

#: What the limits of stages are made for; with more seconds for all of them, each has more.
USUAL_SECONDS = 480.0
#: Seconds that a process may take to end after its last row.
GRACE = 10.0


def chosen(trials: Sequence[Trial], names: str) -> list[Trial]:
    """Returns the stages of some names, joined by commas; all where there are none.

    Raises:
        ArgumentError: no stage has such a name.
    """
    known, wanted = {trial.name: trial for trial in trials}, [name for name in names.split(",") if name]
    if unknown := [name for name in wanted if name not in known]:
        raise ArgumentError(f"no stage is called {unknown[0]!r}; the stages are {', '.join(known)}")
    return [known[name] for name in wanted] or list(trials)


def run(
    trials: Sequence[Trial], equipment: Equipment, seconds: float, out: Path, machine: dict[str, Any]
) -> list[dict[str, Any]]:
    """Runs stages and returns their rows.

    A stage that dies or runs over its limit gets a row that says so, and the next one runs.

    Args:
        trials: in the order in which they run.
        equipment: what they run on.
        seconds: for all of them together; more than usual gives each stage more, too.
        out: file that is written after every stage.
        machine: facts that are written beside the rows.

    Raises:
        ArgumentError: `out` cannot be written.
    """
    check_writable(out)
    start, rows, spent = time.monotonic(), list[dict[str, Any]](), dict[str, float]()
    for trial in trials:
        begin = time.monotonic()
        left = seconds - (begin - start)
        limit = min(left, trial.seconds * max(1.0, seconds / USUAL_SECONDS))
        mine = [finding.row(trial.name) for finding in _findings(trial, equipment, limit)]
        rows += mine
        spent[trial.name] = round(time.monotonic() - begin, 1)
        logger.info("%s, after %.0f s", summary(mine), time.monotonic() - start)
        write_json(out, {"command": "gpu", "machine": machine, "seconds": spent, "rows": rows})
    return rows


def _findings(trial: Trial, equipment: Equipment, limit: float) -> Iterator[Finding]:
    if equipment.gpus < trial.gpus:
        there = f"found {equipment.gpus}" if equipment.gpus else "no GPU"
        yield skipped("stage", there if trial.gpus == 1 else f"it needs {trial.gpus} GPUs, {there}")
    elif limit <= 0.0:
        yield Finding("stage", "not run: the time of all stages is used up", "runs", False)
    else:
        yield from _in_process(trial, equipment, limit)


def _in_process(trial: Trial, equipment: Equipment, limit: float) -> Iterator[Finding]:
    # A process that has looked for GPUs must not be forked.
    context: Any = multiprocessing.get_context("spawn") if equipment.gpus else context_with()
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(trial, equipment, theirs), name=f"stage {trial.name}")
    child.start()
    theirs.close()
    deadline = time.monotonic() + limit
    try:
        while mine.poll(max(0.0, deadline - time.monotonic())):
            yield mine.recv()
        yield Finding("stage", f"ran over its {limit:.0f} s", "ends in time", False)
    except EOFError:
        child.join(GRACE)
        if child.exitcode != 0:
            yield Finding("stage", _ending(child.exitcode), "ends by itself", False)
    finally:
        _end(child)
        mine.close()


def _ending(code: int | None) -> str:
    if code is None:
        return f"did not end within {GRACE:.0f} s of its last row"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"died with exit code {code}"


def _end(child: Any) -> None:
    """Ends a stage's process with all that it started: it leads a group of its own."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.join()


def _child(trial: Trial, equipment: Equipment, pipe: Connection) -> None:
    if hasattr(os, "setsid"):
        os.setsid()
    hide_if_parent_does()
    try:
        for finding in trial.run(equipment):
            pipe.send(finding)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this stage's result
        traceback.print_exc()
        pipe.send(Finding("stage", f"{type(error).__name__}: {error}", "no error", False))
    finally:
        pipe.close()


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a line for each stage, followed by its rows that are not ok."""
    lines = []
    for stage in dict.fromkeys(row["stage"] for row in rows):
        mine = [row for row in rows if row["stage"] == stage]
        good, bad = (sum(row["ok"] is verdict for row in mine) for verdict in (True, False))
        left_out = sum(str(row["value"]).startswith("skipped: ") for row in mine)
        counts = ((good, "ok"), (bad, "NOT OK"), (len(mine) - good - bad - left_out, "measured"), (left_out, "skipped"))
        lines.append(f"{stage}: " + ", ".join(f"{count} {what}" for count, what in counts if count))
        lines += [f"  {row['check']}: {row['value']}, expected {row['expected']}" for row in mine if row["ok"] is False]
    return "\n".join(lines)
