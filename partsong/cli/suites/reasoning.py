"""Runs ``partsong eval reasoning`` and prints a row for each task and thinking method."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partsong.cli.bounds import check_files
from partsong.cli.engines import local_model, make_engine
from partsong.cli.ranks import refuse_torchrun
from partsong.cli.suites.options import Reasoning
from partsong.cli.table import table
from partsong.errors import ArgumentError
from partsong.outputs import write_text
from partsong.progress import progress

if TYPE_CHECKING:
    from partsong.evals.reasoning.job import ReasoningJob
    from partsong.evals.reasoning.outcome import Outcome
    from partsong.evals.reasoning.problem import Problem

__all__ = ["evaluate", "summary"]


def evaluate(options: Reasoning) -> dict[str, Any]:
    """Runs the suite and returns its rows and differences."""
    from partsong.evals.reasoning.job import run_reasoning
    from partsong.evals.reasoning.pareto import pareto_svg

    _check(options)
    job = _job(options)
    engine, start = make_engine(options), time.perf_counter()
    bar = iter(progress(range(len(job.strategies) * len(job.problems)), "problems", unit="problem"))

    def advance(outcome: Outcome) -> None:
        next(bar, None)

    async def run() -> dict[str, Any]:
        try:
            return await run_reasoning(job, engine, on_outcome=advance)
        finally:
            await engine.close()

    tables = asyncio.run(run())
    if options.plot is not None:
        write_text(options.plot, pareto_svg(tables["rows"], title=", ".join(options.tasks)))
    return {
        "command": "eval",
        "suite": "reasoning",
        "nproc": options.nproc or 1,
        "seed": options.seed,
        "seconds": time.perf_counter() - start,
        "engine": engine.name,
        **tables,
    }


def _job(options: Reasoning) -> ReasoningJob:
    """Checks the options and reads them into a job."""
    from partsong.evals.reasoning.job import ReasoningJob
    from partsong.evals.reasoning.suite import read_strategies
    from partsong.reasoning import Budget, Parameters

    model = local_model(options)
    read_strategies(options.strategies, model)
    budget = Budget(tokens=options.budget_tokens)
    budget.validate()
    # All strategies share one pool, so it is drawn with the confidence that best-of-n reads.
    confident = options.samples is not None and any(text.startswith("best-of-n") for text in options.strategies)
    return ReasoningJob(
        problems=_problems(options),
        strategies=tuple(dict.fromkeys(options.strategies)),
        parameters=Parameters(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            logprobs=20 if confident else 0,
        ),
        samples=options.samples,
        seed=options.seed,
        budget=budget,
        concurrency=options.concurrency,
        model=model,
        work=None if options.work is None else Path(options.work),
    )


def _problems(options: Reasoning) -> list[Problem]:
    """Reads the problems; programs are run only where the user said so, and on a machine that can confine them."""
    from partsong.evals.reasoning.datasets import DATASETS
    from partsong.evals.reasoning.job import read_problems
    from partsong.evals.reasoning.published import PUBLISHED
    from partsong.reasoning.answers.sandbox import Sandbox

    programs = {name for name, row in DATASETS.items() if row.kind == "code"}
    programs |= {name for name, row in PUBLISHED.items() if row.runs}
    if (asked := [name for name in options.tasks if name in programs]) and not options.run_programs:
        raise ArgumentError(f"{asked[0]} is judged by running what the model writes; allow that with --run-programs")
    runner = None
    if options.run_programs:
        runner = Sandbox()
        asyncio.run(runner.check())
    data = None if options.data is None else Path(options.data)
    return read_problems(options.tasks, options.num, options.seed, data=data, runner=runner)


def summary(result: dict[str, Any]) -> str:
    """Returns the rows as a table, the differences, and a line on how to read them."""
    shown = [
        {
            "task": row["task"],
            "strategy": row["strategy"],
            "right": f"{row['right']} of {row['problems']}",
            "accuracy": f"{row['accuracy']:.1%} ({row['low']:.1%} to {row['high']:.1%})",
            "tokens": f"{row['tokens_total']:.0f}",
            "critical": f"{row['tokens_critical']:.0f}",
            "cut off": f"{row['truncated']:.1f}",
            "on": row["on"],
        }
        for row in result["rows"]
    ]
    header = {name: name for name in shown[0]}
    lines = [table([header, *shown])]
    for row in result["differences"]:
        lines.append(
            f"{row['task']}: {row['strategy']} against {row['than']}: {row['difference']:+.1%} "
            f"({row['low']:+.1%} to {row['high']:+.1%})"
        )
    lines.append("95 % intervals (Wilson; differences: paired bootstrap); tokens and calls cut off per problem")
    return "\n".join(lines)


def _check(options: Reasoning) -> None:
    refuse_torchrun("partsong eval runs in one process")
    check_files(options.json, options.plot)
