"""Runs the job of ``partsong eval reasoning``; methods that need only samples share one pool of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError
from partsong.evals.reasoning.datasets import DATASETS, load, load_jsonl
from partsong.evals.reasoning.outcome import Outcome, compare_strategies, table_rows
from partsong.evals.reasoning.pool import Pool, collect
from partsong.evals.reasoning.pool_engine import PoolEngine
from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.published import PUBLISHED, load_published
from partsong.evals.reasoning.suite import evaluate, read_strategies
from partsong.evals.reasoning.tasks import TASKS
from partsong.reasoning.answers.sandbox import Runner
from partsong.reasoning.calls.budget import Budget
from partsong.reasoning.calls.call import Parameters
from partsong.reasoning.calls.engine import Engine
from partsong.reasoning.calls.engine_wrappers import BoundedEngine
from partsong.reasoning.calls.journal import Journal
from partsong.reasoning.calls.virtual_time import run_virtual

__all__ = ["POOLED", "ReasoningJob", "read_problems", "run_reasoning"]

#: Strategies that ask only the plain question and so can run on the samples of a pool.
POOLED = ("single", "self-consistency", "adaptive-consistency", "best-of-n", "short-m")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningJob:
    """Describes an evaluation.

    Attributes:
        problems: of one or several tasks.
        strategies: as `read_strategies` takes them; the others are compared with the first.
        parameters: of all draws.
        samples: how many samples of each problem to draw for the strategies of `POOLED`; None runs all of them live.
        seed: of all draws.
        budget: of one problem with one strategy.
        concurrency: at most this many calls at the same time, of all problems together.
        together: at most this many problems at the same time.
        model: name of the engine's model, for `read_strategies`.
        work: folder that keeps samples, calls and finished problems, so that the evaluation can be continued; or None.
    """

    problems: Sequence[Problem]
    strategies: Sequence[str]
    parameters: Parameters
    samples: int | None = None
    seed: int = 0
    budget: Budget | None = None
    concurrency: int = 64
    together: int = 8
    model: str | None = None
    work: Path | None = None


def read_problems(
    names: Sequence[str], num: int, seed: int, *, data: Path | None = None, runner: Runner | None = None
) -> list[Problem]:
    """Reads problems of tasks, benchmarks and JSONL files.

    Args:
        names: of `TASKS` (with ``-`` or ``_``), of `DATASETS` or of `PUBLISHED`, or paths that end in ``.jsonl``.
        num: of each.
        seed: with which tasks draw problems; of benchmarks the first ones are taken.
        data: folder of the files of `PUBLISHED`; None asks the hub.
        runner: runs the programs that a model writes, for benchmarks that are judged so.

    Raises:
        ArgumentError: a name is unknown, or a file cannot be read.
    """
    problems: list[Problem] = []
    for name in dict.fromkeys(names):
        if name.endswith(".jsonl"):
            problems += load_jsonl(name, num=num)
        elif (task := name.replace("-", "_")) in TASKS:
            problems += TASKS[task](num, seed)
        elif name in DATASETS:
            problems += load(name, num, runner=runner)
        elif name in PUBLISHED:
            problems += load_published(name, num, data=data, runner=runner)
        else:
            known = ", ".join([*(task.replace("_", "-") for task in TASKS), *DATASETS, *PUBLISHED])
            raise ArgumentError(f"--tasks: no task {name!r}; there are {known}, and JSONL files")
    return problems


async def run_reasoning(
    job: ReasoningJob, engine: Engine, on_outcome: Callable[[Outcome], None] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Runs an evaluation.

    Args:
        job: what to evaluate.
        engine: answers the calls.
        on_outcome: called with every outcome of a strategy that runs live.

    Returns:
        ``rows``, one per task and strategy, with ``on`` "pool" or "engine"; ``differences`` from the first strategy.
    """
    pooled = [text for text in job.strategies if job.samples is not None and text.partition(":")[0] in POOLED]
    by_strategy: dict[str, list[Outcome]] = {}
    engine = BoundedEngine(engine, job.concurrency)
    with ExitStack() as stack:
        journal = None if job.work is None else stack.enter_context(Journal(job.work / "calls.db"))
        if pooled:
            pool = await _collect(job, engine, stack)
            for outcome in await asyncio.to_thread(_evaluate_on_pool, job, pool, pooled):
                by_strategy.setdefault(outcome.strategy, []).append(outcome)
        for text in job.strategies:
            if text not in pooled:
                by_strategy[text] = await _evaluate_live(job, text, engine, journal, on_outcome)
    outcomes = [outcome for text in dict.fromkeys(job.strategies) for outcome in by_strategy[text]]
    rows = [{**row, "on": "pool" if row["strategy"] in pooled else "engine"} for row in table_rows(outcomes)]
    for row in rows:
        if row["on"] == "pool":
            row["seconds"] = None  # the seconds of a pool are simulated
    return {"rows": rows, "differences": compare_strategies(outcomes, seed=job.seed)}


async def _collect(job: ReasoningJob, engine: Engine, stack: ExitStack) -> Pool:
    import tempfile

    folder = job.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="partsong-")))
    assert job.samples is not None
    return await collect(
        folder / "pool.jsonl",
        job.problems,
        engine,
        job.samples,
        parameters=job.parameters,
        seed=job.seed,
        concurrency=job.concurrency,
        together=job.together,
    )


def _evaluate_on_pool(job: ReasoningJob, pool: Pool, texts: Sequence[str]) -> list[Outcome]:
    """Runs strategies on a pool in simulated time, as if all samples were written at the same speed."""
    evaluation = evaluate(
        job.problems,
        read_strategies(texts, job.model),
        lambda problem: PoolEngine(pool, problem, chunk=1),
        seed=job.seed,
        parameters=job.parameters,
        budget=job.budget,
    )
    return run_virtual(evaluation)[0]


async def _evaluate_live(
    job: ReasoningJob, text: str, engine: Engine, journal: Journal | None, on_outcome: Callable[[Outcome], None] | None
) -> list[Outcome]:
    name = "".join(letter if letter.isalnum() else "-" for letter in text)
    return await evaluate(
        job.problems,
        read_strategies([text], job.model),
        engine,
        seed=job.seed,
        parameters=job.parameters,
        journal=journal,
        outcomes=None if job.work is None else job.work / f"{name}.jsonl",
        budget=job.budget,
        concurrency=job.concurrency,
        together=job.together,
        on_outcome=on_outcome,
    )
