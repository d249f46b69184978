"""Files predictions of published latencies that were not seen: ``python benchmarks/planner/held_out.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.evals.planner.held_out import run, summarise_held_out
from partsong.evals.planner.published import DATA


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to predict."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    data: Path = DATA
    """Published rows, as JSON."""


def main(config: Config) -> None:
    """Predicts every row that was left out, and writes the files."""
    rows = [{**row, "known": most} for most in (2, 1) for row in run(config.data, most=most)]
    known = [row for row in rows if row["known"] == 2]
    without = run(config.data, shares=(0.0,))
    note = (
        "Each paper and machine in turn is left out. All others choose the share of one device's time that each of "
        "several spends beside its part of the work; rows of few devices set two constants per group. "
        f"With rows of one and two devices known: {_said(summarise_held_out(known))}. The same without that share: "
        f"{_said(summarise_held_out(without))}. With rows of one device known: "
        f"{_said(summarise_held_out([row for row in rows if row['known'] == 1]))}; a host that is slower than its "
        "devices does not show on one of them. Nothing was measured for this file."
    )
    lines = [
        [row[name] for name in ("group", "ranks", "method", "seconds")]
        + [f"{row['predicted']:.4g}", f"{row['error']:+.1%}", row["known"], f"{row['share']:.1%}"]
        for row in rows
    ]
    columns = ("group", "devices", "method", "published s", "predicted", "error", "known up to", "share")
    file_result(config.out, __file__, rows, "Published latencies, held out", note, markdown_table(columns, lines))


def _said(said: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{share:.1%}" for share in said["shares"])
    return (
        f"{said['rows']} rows beyond two devices, median error {said['median']:.1%}, nine in ten within "
        f"{said['p90']:.1%}, {said['too_fast']} of them too fast (median {said['bias']:+.1%}; shares {shares})"
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
