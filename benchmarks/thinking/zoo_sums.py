"""Measures what thinking gains on the zoo's `sums` model: ``python benchmarks/thinking/zoo_sums.py``.

Every strategy answers fresh problems live on `LocalEngine`; the table has 95 % intervals and all token counts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.evals.reasoning.outcome import compare_strategies, table_rows
from partsong.evals.reasoning.pareto import pareto_svg
from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.suite import evaluate, greedy
from partsong.reasoning import Parameters, parse_thinking
from partsong.reasoning.local import LocalEngine
from partsong_zoo.sums import answer_of, check, examples
from partsong_zoo.sums.prompts import KNOBS

STRATEGIES = (
    "single",
    "self-consistency:num=8",
    "self-consistency:num=16",
    "sequential-refinement:rounds=3",
    "pdr:schedule=4-1",
    "pdr:schedule=8-4-1",
    "rsa:population=8,generations=3",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    model: str = "sums"
    """The zoo's model, or a folder that the recipe wrote."""
    problems: int = 300
    """Problems of each family."""
    families: tuple[str, ...] = ("countdown", "sum")
    """Kinds of problems."""
    max_tokens: int = 96
    """Most tokens of an answer."""
    seed: int = 11
    """Seed of problems and draws."""


def main(config: Config) -> None:
    """Answers the problems and writes the files."""
    torch.set_num_threads(1)
    asyncio.run(_main(config))


def _problems(config: Config) -> list[Problem]:
    problems = []
    for family in config.families:
        drawn: list[Any] = examples(config.problems, config.seed, [family])  # type: ignore[list-item]
        for number, one in enumerate(drawn):
            judge = partial(_right, one.question)
            gold = answer_of(one.solution) or ""
            problems.append(
                Problem(task=family, number=number, question=one.question, gold=gold, check=judge, extract=answer_of)
            )
    return problems


def _right(question: str, answer: str | None) -> bool:
    return answer is not None and check(question, answer)


async def _main(config: Config) -> None:
    engine, problems = LocalEngine(config.model), _problems(config)
    parameters, done = Parameters(max_tokens=config.max_tokens), []
    for text in ("greedy", *STRATEGIES):
        strategy: Any = greedy
        if text != "greedy":
            thinking = parse_thinking(text)
            own = {k: v for k, v in KNOBS.get(thinking.name, {}).items() if k not in thinking.knobs}
            strategy = partial(thinking, **own)
        done += await evaluate(problems, {text: strategy}, engine, seed=config.seed, parameters=parameters, together=16)
        rows = table_rows(done)
        than = {}
        if text != "greedy":
            gains = compare_strategies(done, to="single", seed=config.seed)
            than = {(gain["task"], gain["strategy"]): gain for gain in gains}
        note = (
            f"{config.model}, float32, one thread, {config.problems} fresh problems of each kind, temperature 1 "
            f"(greedy: 0), at most {config.max_tokens} tokens an answer. Means per problem; intervals are Wilson's, "
            "differences a paired bootstrap."
        )
        columns = ("kind", "strategy", "right, 95 %", "to single, paired", "tokens", "critical", "accepted", "calls")
        table = markdown_table(columns, [_line(row, than.get((row["task"], row["strategy"]))) for row in rows])
        title = "Thinking with the zoo's sums"
        file_result(config.out, __file__, [dict(row) for row in rows], title, note, table)
    for family in config.families:
        chosen = [row for row in rows if row["task"] == family]
        target = config.out.with_name(f"{config.out.name}-{family}.svg")
        target.write_text(pareto_svg(chosen, title=family), encoding="utf-8")
    await engine.close()


def _line(row: dict[str, Any], than: dict[str, Any] | None) -> list[object]:
    gain = "" if than is None else f"{than['difference']:+.1%} ({than['low']:+.1%} to {than['high']:+.1%})"
    counts = (f"{row[name]:.0f}" for name in ("tokens_total", "tokens_critical", "tokens_accepted"))
    right = f"{row['accuracy']:.1%} ({row['low']:.1%} to {row['high']:.1%})"
    return [row["task"], f"`{row['strategy']}`", right, gain, *counts, f"{row['calls']:.1f}"]


if __name__ == "__main__":
    main(tyro.cli(Config))
