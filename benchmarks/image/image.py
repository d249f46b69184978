"""Times the image strategies and files the table: ``python benchmarks/image/image.py``.

With ``--link 1gbit`` everything runs in a separate network namespace whose loopback a token bucket slows down, so that
two processes on one machine exchange at the speed of that link. This needs Linux, root and iproute2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path, spread
from benchmarks.slow_links import run_over


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to time."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    nproc: int = 2
    """Ranks, one thread each."""
    repeats: int = 5
    """Rounds; the median counts."""
    models: list[str] = field(default_factory=lambda: ["flux-like", "wan-like"])
    """Names of models in partsong.evals.bench.models."""
    tokens: list[int] = field(default_factory=lambda: [1024, 4096])
    """Numbers of image tokens."""
    strategies: list[str] = field(default_factory=list)
    """What to time instead of the usual mixes, as on a command line."""
    beside: list[str] = field(default_factory=list)
    """Strategies without ranks that every case has, serial ones too: packed-weights, cross-attention-cache."""
    peers: bool = True
    """Whether diffusers' own context parallelism is timed too."""
    link: list[str] = field(default_factory=list)
    """Rates as tc writes them (2gbit, 1gbit, 500mbit); if empty, plain loopback is timed."""


def main(config: Config) -> None:
    """Times each link and writes the files."""
    rows: list[dict[str, Any]] = []
    loads: list[dict[str, float]] = []
    for link in config.link or [None]:
        timed = _timed(config, link)
        rows += [{**row, "link": link or "loopback"} for row in timed["rows"]]
        loads.append(timed["load"])
    note = (
        "One denoiser step, float32, one thread per process, all cases in turn in one run, median. Drift is the "
        "relative error of the step's output against serial (random weights)."
    )
    load = {key: max(each[key] for each in loads) for key in loads[0]}
    spreads = {
        f"{row['name']} at {row['size']} on {row['link']}": spread(row["seconds_all"])
        for row in rows
        if row["case"] == "serial"
    }
    title, table = "Image strategies", _table(rows)
    file_result(config.out, __file__, rows, title, note, table, spreads=spreads, load=load)


def _timed(config: Config, link: str | None) -> dict[str, Any]:
    settings: dict[str, Any] = {"nproc": config.nproc, "repeats": config.repeats, "models": config.models}
    settings |= {"tokens": config.tokens, "strategies": config.strategies, "beside": config.beside}
    settings["peers"] = config.peers
    return run_over(link, Path(__file__).with_name("image_rows.py"), settings)


def _table(rows: list[dict[str, Any]]) -> str:
    columns = ("link", "model", "tokens", "case", "seconds", "speed-up", "waiting, most", "least", "MB sent per rank")
    lines = [
        (
            row["link"],
            row["model"],
            row["size"],
            row["case"],
            f"{row['seconds_median']:.3f}",
            f"{row['ratio_to_serial']:.2f}x",
            _known(row["waiting_fraction"], lambda share: f"{100 * share:.1f} %"),
            _known(row["waiting_least_fraction"], lambda share: f"{100 * share:.1f} %"),
            _known(row["bytes_sent_per_step"], lambda sent: f"{sent / 1e6:.1f}"),
            f"{row['relative_drift']:.1e}",
        )
        for row in rows
    ]
    return markdown_table((*columns, "drift"), lines)


def _known(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


if __name__ == "__main__":
    main(tyro.cli(Config))
