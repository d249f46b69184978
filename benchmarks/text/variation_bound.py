"""Measures `variation-bound` with the head of `lists-mdlm`: ``python benchmarks/text/variation_bound.py``.

For tasks whose answers leave something open it compares valid answers and tokens per forward with `entropy-bound`'s,
and for three prompts with few answers how the answers are distributed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong import zoo
from partsong.seeds import derive
from partsong_zoo.lists.speed import measure_speed, measure_spread
from partsong_zoo.lists.tasks import draw

MODEL = "lists-mdlm"
#: Tasks of many answers, additions that the model is in doubt about, and one that it knows.
TASKS = ("shuffle", "insert_random", "remove_random", "replace_random", "add", "chain", "sort")
#: Tasks whose answers to one prompt of six items are counted.
SPREAD = ("insert_random", "remove_random", "replace_random")
RULES = (
    "quota",
    "entropy-bound",
    "entropy-bound:gamma=0.5",
    "variation-bound:delta=0",
    "variation-bound",
    "variation-bound:by=random",
    "variation-bound:delta=0.05",
    "variation-bound:delta=0.1",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says how much to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    prompts: int = 100
    """Prompts per task and rule."""
    draws: int = 300
    """Answers drawn to each of the prompts whose answers are counted."""
    seed: int = 21
    """Seed of prompts and draws."""


def main(config: Config) -> None:
    """Measures and writes the files."""
    model, rows = zoo.load(MODEL).model, list[dict[str, Any]]()
    for task in TASKS:
        asked = [draw(task, random.Random(derive(config.seed, task, number))) for number in range(config.prompts)]
        one = draw(task, random.Random(derive(config.seed, task, "one")), 6) if task in SPREAD else None
        for rule in RULES:
            rows.append({"task": task, "rule": rule, **measure_speed(model, asked, rule, temperature=1.0)})
            if one is not None:
                spread = measure_spread(model, one.prompt, rule, num=config.draws, seed=config.seed)
                rows[-1] |= {name: spread[name] for name in ("total_variation", "floor")}
        print(task, flush=True)
    note = (
        f"`lists-mdlm` and the head beside it, {config.prompts} fresh prompts per cell, temperature 1, a canvas of 24 "
        f"in one block, no cache: percentage of valid answers / tokens of the answer and its end per forward, and "
        f"where answers are counted the total variation of {config.draws} answers to one prompt of six items from the "
        f"even distribution."
    )
    lines = [(f"`{rule}`", *(_cell(row) for row in rows if row["rule"] == rule)) for rule in RULES]
    table = markdown_table(("rule", *TASKS), lines)
    file_result(config.out, __file__, rows, "The bound on total variation with a trained head", note, table)


def _cell(row: dict[str, Any]) -> str:
    apart = f" / {row['total_variation']:.2f}" if "total_variation" in row else ""
    return f"{100 * row['accuracy']:.0f} / {row['tokens_per_forward']:.2f}{apart}"


if __name__ == "__main__":
    main(tyro.cli(Config))
