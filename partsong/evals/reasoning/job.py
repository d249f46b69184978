"""What ``partsong eval reasoning`` does: problems by strategies, on one pool of samples where that is enough."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError
from partsong.evals.reasoning.datasets import DATASETS, load, load_jsonl
from partsong.evals.reasoning.outcome import Outcome, compared, table_rows
from partsong.evals.reasoning.pool import Pool, PoolEngine, collect
from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.suite import evaluate, read_strategies
from partsong.evals.reasoning.tasks import TASKS
from partsong.reasoning.calls.budget import Budget
from partsong.reasoning.calls.call import Parameters
from partsong.reasoning.calls.engine import Engine
from partsong.reasoning.calls.engine_wrappers import BoundedEngine
from partsong.reasoning.calls.journal import Journal
from partsong.reasoning.calls.virtual_time import run_virtual

__all__ = ["POOLED", "ReasoningJob", "read_problems", "run_reasoning"]

#: Strategies that ask nothing but the plain question, and so can run on samples that are there already.
POOLED = ("single", "self-consistency", "adaptive-consistency", "best-of-n", "short-m")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningJob:
    """An evaluation.

    Attributes:
        problems: of one or several tasks.
        strategies: as `read_strategies` takes them; the first is what the others are compared with.
        parameters: of all draws.
        samples: draw so many of each problem once, and run the strategies of `POOLED` on them; None runs all live.
        seed: of all draws.
        budget: of one problem under one strategy.
        concurrency: most calls under way, of all problems together.
        together: problems under way.
        model: what the engine's model is called, for `read_strategies`.
        work: folder for samples, calls and finished problems, to go on from; None keeps nothing.
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


def read_problems(names: Sequence[str], num: int, seed: int) -> list[Problem]:
    """Problems of tasks, benchmarks and JSONL files.

    Args:
        names: out of `TASKS` (``-`` may stand for ``_``) or `DATASETS`, or paths that end in ``.jsonl``.
        num: of each.
        seed: of the tasks' draws; benchmarks give their first ones.

    Raises:
        ArgumentError: a name nobody knows, or a file that cannot be read.
    """
    found: list[Problem] = []
    for name in dict.fromkeys(names):
        if name.endswith(".jsonl"):
            found += load_jsonl(name, num=num)
        elif (task := name.replace("-", "_")) in TASKS:
            found += TASKS[task](num, seed)
        elif name in DATASETS:
            found += load(name, num)
        else:
            known = ", ".join([*(task.replace("_", "-") for task in TASKS), *DATASETS])
            raise ArgumentError(f"--tasks: no task {name!r}; there are {known}, and JSONL files")
    return found


async def run_reasoning(
    job: ReasoningJob, engine: Engine, told: Callable[[Outcome], None] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Runs an evaluation.

    Args:
        job: what to do.
        engine: answers.
        told: of every problem that is done.

    Returns:
        ``rows``, one per task and strategy, with ``on`` "pool" or "engine"; ``differences`` from the first strategy.
    """
    pooled = [text for text in job.strategies if job.samples is not None and text.partition(":")[0] in POOLED]
    made: dict[str, list[Outcome]] = {}
    engine = BoundedEngine(engine, job.concurrency)
    with ExitStack() as stack:
        journal = None if job.work is None else stack.enter_context(Journal(job.work / "calls.db"))
        if pooled:
            pool = await _collected(job, engine, stack)
            for outcome in await asyncio.to_thread(_on_pool, job, pool, pooled):
                made.setdefault(outcome.strategy, []).append(outcome)
        for text in job.strategies:
            if text not in pooled:
                made[text] = await _live(job, text, engine, journal, told)
    done = [outcome for text in dict.fromkeys(job.strategies) for outcome in made[text]]
    rows = [{**row, "on": "pool" if row["strategy"] in pooled else "engine"} for row in table_rows(done)]
    for row in rows:
        if row["on"] == "pool":
            row["seconds"] = None  # pretended ones
    return {"rows": rows, "differences": compared(done, seed=job.seed)}


async def _collected(job: ReasoningJob, engine: Engine, stack: ExitStack) -> Pool:
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


def _on_pool(job: ReasoningJob, pool: Pool, texts: Sequence[str]) -> list[Outcome]:
    """In pretended time, as if all samples were written at one speed."""
    made = evaluate(
        job.problems,
        read_strategies(texts, job.model),
        lambda problem: PoolEngine(pool, problem, chunk=1),
        seed=job.seed,
        parameters=job.parameters,
        budget=job.budget,
    )
    return run_virtual(made)[0]


async def _live(
    job: ReasoningJob,
    text: str,
    engine: Engine,
    journal: Journal | None,
    told: Callable[[Outcome], None] | None,
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
        told=told,
    )
