"""Measures what papers promise: ``python benchmarks/promises.py``; a stopped run goes on where it was.

It files the rows of ``partsong eval promises`` and writes docs/promises.md from the newest file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.promises_filed import FILED
from partsong.evals.promises.evidence import Effort
from partsong.evals.promises.rows import PROMISES
from partsong.evals.promises.suite import chosen, measure_promises

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "promises.md", ROOT / "benchmarks" / "results"

_HEAD = """# What papers promise

Does it hold, when, and at what cost? Each row has what a paper says of its method and what was measured here, on
models small enough for two processor cores. *Holds*: as promised. *Holds in part*: it helps, but less, or only where
the last column says. *Not here*: it does not help. That may be the scale: models of 0.1 to 200 M parameters, pictures
of 64 to 256 tokens and two cores are not what the papers had.
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    work: Path = Path("out/promises")
    """Folder for finished rows, from which a stopped run continues."""
    methods: tuple[str, ...] = ()
    """Rows to measure; all if empty."""
    problems: int = 150
    """Problems of a row."""
    samples: int = 64
    """Most samples of a problem."""
    rounds: int = 5
    """How often each time is taken."""
    seed: int = 11
    """Seed of all draws."""


def main(config: Config) -> None:
    """Measures, files and writes the page."""
    effort = Effort(problems=config.problems, samples=config.samples, rounds=config.rounds, seed=config.seed)
    rows = measure_promises(chosen(config.methods), effort, config.work)
    note = (
        f"{config.problems} fresh problems a row of thinking, up to {config.samples} samples each, temperature 1; "
        f"times are medians of {config.rounds} rounds, both sides in turn. Intervals are 95 % by a paired bootstrap; "
        "of times, the smallest and the largest round. Predictions are the planner's."
    )
    columns = ("method", "setting", "measured", "cost", "verdict")
    table = markdown_table(columns, [[row[name] for name in columns] for row in rows])
    file_result(config.out, __file__, rows, "What papers promise", note, table)
    PAGE.write_text(page(), encoding="utf-8")


def newest() -> Path:
    """Returns the newest file."""
    return max((RESULTS / "promises").glob("*.json"))


def page() -> str:
    """Returns docs/promises.md: the rows of the newest file, and those that older files have."""
    file = newest()
    measured = json.loads(file.read_text(encoding="utf-8"))["rows"]
    columns = ("method", "paper and promise", "measured", "cost", "verdict", "why")
    first = [_line(row) for row in measured]
    missing = [row.method for row in PROMISES if row.method not in {line["method"] for line in measured}]
    other = ("method", "paper and promise", "measured", "verdict", "why")
    second = [
        (
            row.method,
            f"{row.paper}: {row.promise}",
            f"{row.measured} ([file]({_link(row.file)}))",
            row.verdict,
            row.because,
        )
        for row in FILED
    ]
    counts = Counter([row["verdict"] for row in measured] + [row.verdict for row in FILED])
    total = ", ".join(f"{verdict} {counts[verdict]}" for verdict in ("holds", "holds in part", "not here"))
    return "\n".join(
        [
            _HEAD,
            f"Of {counts.total()} rows: {total}.\n",
            "## Measured together\n",
            f"One run of `partsong eval promises` ([file]({_link(file.stem, 'promises')})); it takes up again where it "
            "was stopped. Brackets hold 95 % intervals; of times, the smallest and the largest of all rounds. "
            "Predictions are the planner's."
            + (f" Not measured yet: {', '.join(f'`{name}`' for name in missing)}." if missing else "")
            + "\n",
            markdown_table(columns, first),
            "\n## Measured before\n",
            "Rows of files that still hold.\n",
            markdown_table(other, second),
            "",
        ]
    )


def _line(row: dict[str, Any]) -> Sequence[object]:
    promised = f"{row['paper']}: {row['promise']}. Here: {row['setting']}"
    # Why it is so may be known better by now than when it was measured.
    because = {each.method: each.because for each in PROMISES}.get(row["method"], row["because"])
    return row["method"], promised, row["measured"], row["cost"], row["verdict"], because


def _link(name: str, topic: str = "") -> str:
    return f"../benchmarks/results/{topic and f'{topic}/'}{name}.md"


if __name__ == "__main__":
    main(tyro.cli(Config))
