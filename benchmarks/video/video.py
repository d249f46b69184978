"""Times the video strategies and files the table: ``python benchmarks/video/video.py``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.video.contests import run


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to time."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    nproc: int = 2
    """Ranks, one thread each."""
    repeats: int = 5
    """Rounds; the median counts."""
    blocks: int = 16
    """Blocks of each video, with four latent frames each."""


def main(config: Config) -> None:
    """Times and writes the files."""
    rows = run(nproc=config.nproc, repeats=config.repeats, blocks=config.blocks)
    note = (
        "Whole videos from noise to latents, a Wan-like model of 16 M parameters with random weights, float32, one "
        "thread per process, one rank and all ranks in turn, medians. Idle is what is missing to as many times the "
        "speed as there are ranks; steady is the time between two blocks once the first have left."
    )
    file_result(config.out, __file__, rows, "Video strategies", note, _table(rows))


def _table(rows: list[dict[str, Any]]) -> str:
    columns = ("strategy", "frames", "one rank, s", "all ranks, s", "speed-up", "steady", "idle", "formula")
    lines = [
        (
            row["name"],
            row["size"],
            f"{row['seconds_serial']:.2f}",
            f"{row['seconds_median']:.2f}",
            f"{row['ratio_to_serial']:.2f}x",
            f"{row['steady_ratio']:.2f}x" if row.get("steady_ratio") else "",
            f"{100 * row['idle']:.1f} %" if "idle" in row else "",
            f"{100 * row['idle_predicted']:.1f} %" if "idle" in row else "",
            f"{row['first_seconds_serial']:.2f}, {row['first_seconds']:.2f}",
            f"{row['bytes_sent'] / 1e6:.1f}",
        )
        for row in rows
    ]
    return markdown_table((*columns, "first block on one, all, s", "MB sent by the first rank"), lines)


if __name__ == "__main__":
    main(tyro.cli(Config))
