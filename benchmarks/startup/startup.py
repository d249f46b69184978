"""Measures how long commands take to start: ``python benchmarks/startup/startup.py``.

The commands run one after the other, in turn, each in a process of its own. The first step of an image is over when the
ledger has its first line, and has begun before. Processor time is that of the command's own process, without its ranks.
No traces of earlier plans are there to be read.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path, spread

PLAN = "plan --model flux-dev --gpus 4x4090 --link pcie4"
IMAGE = "image PROMPT --model shapes --steps 1 --ledger ledger.jsonl --out image.png"
RANKS = "image PROMPT --nproc 2 --strategy ulysses --ledger ledger.jsonl --out image.png"
COMMANDS = {"help": "--help", "plan": PLAN, "traced plan": f"{PLAN} --height 512", "image": IMAGE, "two ranks": RANKS}
#: Seconds between two looks at the ledger.
GLANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    repeats: int = 5
    """How often each command is run; the median counts."""
    prompt: str = "a red circle"
    """What the image shows."""


def main(config: Config) -> None:
    """Runs the commands in turn and files the table."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in COMMANDS}
    for command in COMMANDS.values():
        _run(command, config.prompt)  # once unmeasured: files are in memory and compiled from here on
    for _ in range(config.repeats):
        for name, command in COMMANDS.items():
            runs[name].append(_run(command, config.prompt))
    rows = [_row(name, taken) for name, taken in runs.items()]
    measured = ("first_step", "seconds", "processor")
    lines = [(f"`partsong {COMMANDS[row['name']]}`", *(_cell(row.get(key)) for key in measured)) for row in rows]
    note = (
        f"Median of {config.repeats} runs, in turn, after one that does not count. *First step* is the time from the "
        "start of the command to the end of the first denoising step; *processor* is that of its own process, without "
        "ranks. A plan at the model's own size reads traces that come with the package; at another it traces calls."
    )
    table = markdown_table(("command", "first step", "until it ends", "processor"), lines)
    spreads = {name: spread([each["seconds"] for each in taken]) for name, taken in runs.items()}
    file_result(config.out, __file__, rows, "Start of commands", note, table, spreads=spreads)


def _row(name: str, taken: list[dict[str, float]]) -> dict[str, Any]:
    return {"name": name} | {key: statistics.median(each[key] for each in taken) for key in taken[0]} | {"runs": taken}


def _cell(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"


def _run(command: str, prompt: str) -> dict[str, float]:
    """Runs a command in an empty folder; returns its seconds, and those until the first step if it has any."""
    words = [prompt if word == "PROMPT" else word for word in command.split()]
    with tempfile.TemporaryDirectory() as folder:
        ledger, found = Path(folder) / "ledger.jsonl", {}
        environment = {**os.environ, "PARTSONG_TRACES": str(Path(folder) / "traces")}
        before, start = os.times(), time.perf_counter()
        with (Path(folder) / "errors").open("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "partsong", *words],
                cwd=folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            while "first_step" not in found and process.poll() is None and "--ledger" in words:
                if ledger.exists() and ledger.stat().st_size:
                    found["first_step"] = time.perf_counter() - start
                time.sleep(GLANCE)
            if process.wait() != 0:
                errors.seek(0)
                raise SystemExit(f"partsong {command} failed with exit code {process.returncode}: {errors.read()}")
        seconds, after = time.perf_counter() - start, os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        return {**found, "seconds": seconds, "processor": spent}


if __name__ == "__main__":
    main(tyro.cli(Config))
