"""Kills a PDR run at random moments: ``python benchmarks/thinking/reasoning_kills.py``.

A run is started again and again on one journal, and killed with SIGKILL after a random time, until it has been killed
often enough; then it may end. No completed call may be made twice, and the report must be that of an undisturbed run. A
replay must give that report too, byte for byte and without asking the engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.reasoning import Journal, Line, Request, Run, ScriptedEngine, final_number, pdr

SCHEDULE = (8, 4, 1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says how often to kill."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    kills: int = 100
    """Kills in all."""
    kills_per_run: int = 4
    """Kills before a run may end."""
    seed: int = 0
    """Seed of the moments."""
    journal: Path | None = None
    """The journal of a child; the benchmark passes it on."""
    replay: bool = False
    """Whether the child replays."""


def _answer(request: Request, draw: random.Random) -> Line:
    right = draw.random() < 0.6
    return Line(text=f"so it is {7 if right else draw.choice((8, 9))}", tokens=draw.randint(20, 80))


async def _child(path: Path, replay: bool) -> None:
    engine = ScriptedEngine(_answer, seconds_per_token=0.002)
    with Journal(path, replay=replay) as journal:
        run = Run(engine, seed=3, journal=journal)
        print("begun", flush=True)
        answer = await pdr(run, "what is it", extract=final_number, schedule=SCHEDULE)
    report: dict[str, Any] = {"answer": answer.answer, "text": answer.text, "calls": answer.calls, **answer.summary}
    times = {name: report.pop(name) for name in ("seconds",)}
    print(json.dumps({"asked": len(engine.asked), "replayed": run.replayed, "report": report, **times}), flush=True)


def _start(path: Path, *more: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, __file__, "--journal", str(path), *more], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "begun\n"
    return child


def _end(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    report = json.loads(child.stdout.read())
    if child.wait() != 0:
        raise RuntimeError(f"a child ended with {child.returncode}")
    return report


def _killed(path: Path, times: int, draw: random.Random) -> dict[str, Any]:
    """Kills one run `times` times, and returns its report and whether a completed call was made again."""
    repeated, done = 0, 0
    while done < times:
        with Journal(path) as journal:
            before = journal.completed
        child = _start(path)
        try:
            child.wait(draw.uniform(0.0, 0.25))
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)
            done += 1
        child.wait()
        with Journal(path) as journal:
            repeated += journal.completed < before
    with Journal(path) as journal:
        kept = journal.completed
    ended = _end(_start(path))
    replays = [_end(_start(path, "--replay")) for _ in range(2)]
    return {
        "kills": done,
        "kept": kept,
        "asked": ended["asked"],
        "repeated": repeated + (ended["replayed"] != kept) + (ended["asked"] + kept != ended["report"]["calls"]),
        "report": ended["report"],
        "replay_equal": all(
            {**r["report"], "s": r["seconds"]} == {**ended["report"], "s": ended["seconds"]} for r in replays
        )
        and all(r["asked"] == 0 for r in replays),
    }


def main(config: Config) -> None:
    """Kills and writes the files."""
    if config.journal is not None:
        asyncio.run(_child(config.journal, config.replay))
        return
    draw, rows = random.Random(config.seed), []
    with tempfile.TemporaryDirectory() as folder:
        whole = _end(_start(Path(folder) / "whole.db"))
        while sum(row["kills"] for row in rows) < config.kills:
            path = Path(folder) / f"{len(rows)}.db"
            left = config.kills - sum(row["kills"] for row in rows)
            row = _killed(path, min(config.kills_per_run, left), draw)
            rows.append({**row, "equal": row.pop("report") == whole["report"]})
    note = (
        f"PDR {SCHEDULE} with a summary per round on a scripted engine, {sum(r['kills'] for r in rows)} SIGKILLs in "
        f"{len(rows)} runs: {sum(r['equal'] for r in rows)} reports equal that of an undisturbed run, "
        f"{sum(r['repeated'] for r in rows)} completed calls were made again, "
        f"{sum(r['replay_equal'] for r in rows)} replays (two each) equal their run, seconds included."
    )
    columns = ("kills", "calls kept before the last part", "asked in it", "made again", "report equal", "replay equal")
    names = ("kills", "kept", "asked", "repeated", "equal", "replay_equal")
    table = markdown_table(columns, [[row[name] for name in names] for row in rows])
    file_result(config.out, __file__, rows, "Killed PDR runs", note, table)


if __name__ == "__main__":
    main(tyro.cli(Config))
