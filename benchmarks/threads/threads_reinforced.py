"""Measures what reinforcement gains: ``python benchmarks/threads/threads_reinforced.py --after FOLDER``.

A model that thinks in threads answers fresh problems on `LocalEngine` before and after `zoo/recipes/train_threads.py
--stages grpo`. It answers greedily, and with draws at temperature 1, with which the rewards were computed. With
`--modes threads sequential` its twin, which thinks in one chain, is measured beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.threads.threads import fresh_problems
from partsong.evals.reasoning.outcome import Outcome, compare_strategies, table_rows
from partsong.evals.reasoning.suite import evaluate
from partsong.reasoning import Parameters
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.strategies.fork_join import fork_join
from partsong.reasoning.strategies.single import single
from partsong.reasoning.threads.formats import FormatName


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    after: Path
    """Folder of the recipe's run, with its batches and the exported model."""
    before: str = "products"
    """The model that it began with, or a folder with one for each mode."""
    modes: tuple[Literal["threads", "sequential"], ...] = ("threads",)
    """How the models think."""
    trained: str = ""
    """How it was trained, for the note."""
    format: FormatName = "multiverse"
    """Tags of the threads."""
    problems: int = 1008
    """Fresh problems of all sizes."""
    seed: int = 23
    """Seed of the problems."""


async def measure(config: Config) -> dict[tuple[str, str], list[Outcome]]:
    """Returns outcomes by model and way of drawing."""
    threads = partial(fork_join, format=config.format, teach=False, max_depth=1, thread_tokens=128)
    problems, outcomes = fresh_problems(config.problems, config.seed), dict[tuple[str, str], list[Outcome]]()
    for mode, when in itertools.product(config.modes, ("before", "after")):
        started = Path(config.before) / mode
        before = started if started.is_dir() else config.before
        engine = LocalEngine(config.after / "export" / mode if when == "after" else before)
        model, strategy = named(config, mode, when), threads if mode == "threads" else single
        for drawn, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            parameters = Parameters(temperature=temperature, max_tokens=512)
            outcomes[model, drawn] = await evaluate(
                problems, {model: strategy}, engine, parameters=parameters, together=32
            )
        await engine.close()
    return outcomes


def main(config: Config) -> None:
    """Answers the problems and writes the files."""
    torch.set_num_threads(1)
    measured = asyncio.run(measure(config))
    rows, gains = list[dict[str, Any]](), list[str]()
    for drawn in ("greedy", "temperature 1"):
        outcomes = [one for (_, way), each in measured.items() if way == drawn for one in each]
        together = [Outcome(**{**one.as_json(), "task": "all"}) for one in outcomes]
        rows += [{"drawn": drawn, **row} for row in table_rows([*together, *outcomes])]
        pairs = [(named(config, mode, "after"), named(config, mode, "before")) for mode in config.modes]
        pairs += itertools.combinations((after for after, _ in reversed(pairs)), 2)
        for one, other in pairs:
            (more,) = compare_strategies([each for each in together if each.strategy in (one, other)], to=other)
            points = (f"{100 * more[name]:+.1f}" for name in ("difference", "low", "high"))
            gains.append("{} over {}, {} {} ({} to {})".format(one, other, drawn, *points))
    note = (
        f"{config.trained} {' '.join(map(partial(draws, config), config.modes))} {config.problems} fresh problems, as "
        "many of each size, float32. Means per problem; `critical`: tokens of the longest chain of calls that wait for "
        f"each other. Intervals are Wilson's. Gain in points, in pairs, over all problems (95 %): {'; '.join(gains)}."
    )
    columns = ("problems", "drawn", "model", "right, 95 %", "tokens", "critical")
    table = markdown_table(columns, [_line(row) for row in rows])
    file_result(config.out, __file__, rows, "Threads, reinforced", note, table)


def named(config: Config, mode: str, when: str) -> str:
    """Names a model in the table."""
    return when if len(config.modes) == 1 else f"{mode}, {when}"


def draws(config: Config, mode: str) -> str:
    """Says how the draws of the batches went."""
    batches = [json.loads(line) for line in (config.after / f"grpo-{mode}.jsonl").read_text().splitlines()]
    shares = [[one["right"] for one in batches[at : at + 20]] for at in range(0, len(batches), 20)]
    means = ", ".join(f"{sum(each) / len(each):.1%}" for each in shares)
    return f"{len(batches)} batches of {mode}; right in the draws of each twenty of them: {means}."


def _line(row: dict[str, Any]) -> list[object]:
    right = f"{row['accuracy']:.1%} ({row['low']:.1%} to {row['high']:.1%})"
    tokens = (f"{row[name]:.1f}" for name in ("tokens_total", "tokens_critical"))
    return [row["task"], row["drawn"], row["strategy"], right, *tokens]


if __name__ == "__main__":
    main(tyro.cli(Config))
