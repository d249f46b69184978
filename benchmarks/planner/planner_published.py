"""Files predictions of published latencies: ``python benchmarks/planner/planner_published.py``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.evals.planner.published import DATA, read_points, run, summarise


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to predict."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    data: Path = DATA
    """Published rows, as JSON."""


def main(config: Config) -> None:
    """Predicts every row and writes the files."""
    rows = run(config.data)
    said, others = summarise(rows), read_points(config.data)[1]
    errors = {name: f"{100 * value:.1f} %" for name, value in said.items() if isinstance(value, float)}
    refused = sum("refused" in row for row in rows)
    note = (
        f"From data sheets alone, {said['profiles_only']} rows: median error {errors['profiles_only_median']}, nine in "
        f"ten within {errors['profiles_only_p90']}. With two constants per group from its rows of one and two devices, "
        f"{said['held_out']} other rows: median {errors['held_out_median']}, nine in ten within "
        f"{errors['held_out_p90']}; {errors['pairs_ordered']} of {said['pairs']} pairs of a group in the right order. "
        f"{len(others)} rows are of models, devices or methods that the planner does not know, and {refused} of mixes "
        "that do not run here. Nothing was measured for this file."
    )
    lines = [
        (
            row["group"],
            row["ranks"],
            row["method"],
            row["seconds"],
            f"{row['predicted']:.4g}",
            f"{row['error']:+.1%}",
            "" if row["fitted"] is None else f"{row['fitted']:.4g}",
            "" if row["fitted"] is None else f"{row['fitted_error']:+.1%}",
        )
        for row in rows
        if "refused" not in row
    ]
    columns = ("group", "devices", "method", "published s", "data sheets", "error", "two constants", "error")
    table = markdown_table(columns, lines)
    file_result(config.out, __file__, rows, "Published latencies, predicted", note, table)


if __name__ == "__main__":
    main(tyro.cli(Config))
