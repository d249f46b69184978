"""Compares the planner's predictions with this machine: ``python benchmarks/planner/planner.py``.

Every setting is calibrated, timed and predicted anew. With ``--link 1gbit`` it runs in a separate network namespace
whose loopback a token bucket slows down, which needs Linux, root and iproute2. A run that was stopped continues with
its last setting.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.slow_links import run_over
from partsong.jobs.load import LoadWatch

_BEFORE = LoadWatch()
#: Least predicted speed-up for which a mix is worth its ranks, as in the planner.
CLEAR = 1.1


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to time."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    nproc: list[int] = field(default_factory=lambda: [2, 4])
    """Ranks, one thread each."""
    repeats: int = 5
    """Rounds; the median counts."""
    link: list[str] = field(default_factory=lambda: ["loopback", "4gbit", "1gbit", "500mbit"])
    """Rates as tc writes them."""
    models: list[str] = field(default_factory=lambda: ["flux-like", "shapes"])
    """Names of models in benchmarks.planner.local."""


def main(config: Config) -> None:
    """Times each setting and writes the files."""
    rows: list[dict[str, Any]] = []
    for nproc in config.nproc:
        for link in config.link:
            part = _part(config, nproc, link)
            if not part.exists():
                part.write_text(json.dumps([{**row, "link": link} for row in _timed(config, nproc, link)]))
            rows += json.loads(part.read_text())
    errors = [abs(row["error"]) for row in rows]
    choices = _choices(rows)
    regret = [choice["regret"] for choice in choices]
    slower = [choice for choice in choices if choice["to_serial"] > 1.05]
    note = (
        "One denoiser step, float32, one thread per process, all mixes in turn in one run, median. *Predicted* comes "
        "from a calibration right before. "
        f"Median error {100 * statistics.median(errors):.1f} % over {len(errors)} rows, nine in ten within "
        f"{100 * sorted(errors)[int(0.9 * len(errors))]:.1f} %. What the planner would choose is at most "
        f"{100 * max(regret):.1f} % slower than the best that was measured (median "
        f"{100 * statistics.median(regret):.1f} %), and slower than one process by more than 5 % in {len(slower)} of "
        f"{len(choices)} settings."
    )
    load = {"load_before": _BEFORE.before, "load_of_others": max(row["load_of_others"] for row in rows)}
    page = _page(rows, choices)
    file_result(config.out, __file__, [*rows, *choices], "The planner", note, page, load=load)
    for nproc in config.nproc:
        for link in config.link:
            _part(config, nproc, link).unlink()


def _page(rows: list[dict[str, Any]], choices: list[dict[str, Any]]) -> str:
    """Returns the tables of the choices and of all rows."""
    lines = [
        (
            r["link"],
            r["ranks"],
            r["model"],
            r["mix"],
            f"{r['seconds']:.4f}",
            f"{r['predicted']:.4f}",
            f"{r['error']:+.1%}",
        )
        for r in rows
    ]
    table = markdown_table(("link", "ranks", "model", "mix", "seconds", "predicted", "error"), lines)
    chosen = markdown_table(
        ("link", "ranks", "model", "chosen", "best measured", "regret", "against one process"),
        [
            (c["link"], c["ranks"], c["model"], c["chosen"], c["best"], f"{c['regret']:.1%}", f"{c['to_serial']:.2f}")
            for c in choices
        ],
    )
    return f"{chosen}\n\n{table}"


def _choices(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each setting the mix that the planner would take, and its time relative to the best one."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["link"], row["ranks"], row["model"]].append(row)
    choices = []
    for (link, ranks, model), mine in groups.items():
        serial = next(row for row in mine if row["mix"] == "serial")
        first = min(mine, key=lambda row: row["predicted"])
        chosen = serial if first["predicted"] > serial["predicted"] / CLEAR else first
        best = min(mine, key=lambda row: row["seconds"])
        choices.append(
            {
                "link": link,
                "ranks": ranks,
                "model": model,
                "chosen": chosen["mix"],
                "best": best["mix"],
                "regret": chosen["seconds"] / best["seconds"] - 1,
                "to_serial": chosen["seconds"] / serial["seconds"],
            }
        )
    return choices


def _part(config: Config, nproc: int, link: str) -> Path:
    """Returns the file that keeps the rows of one setting until all are there."""
    return config.out.with_name(f"{config.out.name}-{nproc}-{link}.part")


def _timed(config: Config, nproc: int, link: str) -> list[dict[str, Any]]:
    settings = {"nproc": nproc, "repeats": config.repeats, "models": config.models}
    return run_over(None if link == "loopback" else link, Path(__file__).with_name("planner_rows.py"), settings)


if __name__ == "__main__":
    main(tyro.cli(Config))
