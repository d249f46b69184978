"""Measures `variation-bound` on a model that is never wrong: ``python benchmarks/oracle/oracle_variation.py``.

It reads the exact dependences. Beside it stands the most that any rule could reach which draws the tokens of a step
independently, on a task where that can be enumerated.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.evals.oracle.suite import run

Row = dict[str, Any]
#: What is measured: rules with their numbers of checked drafts.
CASES = (
    ("entropy-bound", 0),
    ("dependency", 0),
    ("variation-bound:delta=0", 0),
    ("variation-bound", 0),
    ("variation-bound:delta=0.1", 0),
    ("entropy-bound", 8),
    ("variation-bound", 8),
    ("variation-bound:by=random", 0),
    ("variation-bound:by=random", 8),
)
#: The share of texts that must be valid.
VALID = 0.99
#: How many forwards an invalid text may save: the larger, the more careful the best way to decode.
PRICES = tuple(10 * 1.1**power for power in range(60))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says how many texts to decode."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    num: int = 1000
    """Texts per rule and task."""


def best_way(items: int, price: float) -> tuple[float, float]:
    """Returns forwards and invalid texts, in the mean, of the best way to replace one item of a list at random.

    Each item is the new one with equal chances, so only the number of places of a step can be chosen. Where the new one
    has come, all others are sure and take one more forward.

    Args:
        items: of the list.
        price: forwards that an invalid text counts as much as.
    """

    @functools.cache
    def best(left: int) -> tuple[float, float, float]:
        if left <= 1:
            return float(left), float(left), 0.0
        ways = []
        for count in range(1, left + 1):
            none = (1 - 1 / left) ** count
            one = count / left * (1 - 1 / left) ** (count - 1)
            rest = best(left - count) if count < left else (0.0, 0.0, 1.0)
            forwards = 1 + (1 - none) * (count < left) + none * rest[1]
            invalid = 1 - none - one + none * rest[2]
            ways.append((forwards + price * invalid, forwards, invalid))
        return min(ways)

    return best(items)[1:]


def ceiling(items: int) -> float:
    """Returns the most tokens per forward with `VALID` texts, where two ways may also be mixed."""
    ways = sorted({best_way(items, price) for price in PRICES})
    allowed = 1 - VALID
    forwards = [cost for cost, invalid in ways if invalid <= allowed]
    for cost, invalid in ways:
        for other, fewer in ways:
            if fewer <= allowed < invalid:
                share = (allowed - fewer) / (invalid - fewer)
                forwards.append(share * cost + (1 - share) * other)
    return items / min(forwards)


def main(config: Config) -> None:
    """Decodes and writes the files."""
    rows = [row for rule, verify in CASES for row in run(rules=[rule], num=config.num, verify=verify)]
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["task"] != "all"))
    lines = [_line(rows, rule, verify, tasks) for rule, verify in CASES]
    most = {f"replace {items}": ceiling(items) for items in (8, 15)}
    rows += [{"task": task, "rule": "ceiling", "tokens_per_forward": speed} for task, speed in most.items()]
    note = (
        f"Exact conditionals of enumerated texts, temperature 1, {config.num} texts per cell: percentage of valid "
        f"texts / tokens per forward, every forward counted. Checked: drafts of `verify`, which leave the text as it "
        f"is. Mean: the geometric / the plain mean of the tokens per forward. Rows: per forward. Bound: the largest of "
        f"the tasks' mean certificates, in total variation. Of all rules that draw a step's tokens independently and "
        f"check no drafts, none can have more than {most['replace 8']:.2f} tokens per forward on `replace` and "
        f"{most['replace 15']:.2f} on `replace 15` with {VALID:.0%} valid texts (enumerated)."
    )
    table = markdown_table(("rule", "checked", *tasks, "least", "mean", "rows", "bound"), lines)
    file_result(config.out, __file__, rows, "The bound on total variation on an oracle", note, table)


def _line(rows: list[Row], rule: str, verify: int, tasks: list[str]) -> tuple[object, ...]:
    """Returns a line of the table."""
    cells = {row["task"]: row for row in rows if (row["rule"], row["verify"]) == (rule, verify)}
    whole, shown = cells["all"], [cells[task] for task in tasks]
    speeds, bounds = ([row[name] for row in shown] for name in ("tokens_per_forward", "variation"))
    texts = [f"{100 * row['valid']:.1f} / {row['tokens_per_forward']:.2f}" for row in shown]
    mean = f"{whole['tokens_per_forward']:.2f} / {sum(speeds) / len(speeds):.2f}"
    bound = "" if None in bounds else f"{max(bounds):.3f}"
    return f"`{rule}`", verify, *texts, f"{100 * whole['valid']:.1f}", mean, f"{whole['rows_per_forward']:.1f}", bound


if __name__ == "__main__":
    main(tyro.cli(Config))
