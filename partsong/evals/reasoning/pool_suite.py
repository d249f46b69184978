"""One pool, every pool-based strategy: rows with intervals, and differences in pairs, without a new token.

>>> parse_rescorer("self-consistency:num=16").keywords
{'num': 16}
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from partsong.errors import ArgumentError
from partsong.evals.reasoning.intervals import Resampler, wilson
from partsong.evals.reasoning.pool import Pool
from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.rescore import RESCORERS, Rescored, pass_at
from partsong.evals.reasoning.score_table import ScoreTable, score_table

__all__ = ["SHOWN", "parse_rescorer", "pool_suite", "table_suite"]

#: What is scored where nothing else is asked for; all need 64 samples, and confidence.
SHOWN = (
    *("single", "self-consistency:num=4", "self-consistency:num=8", "self-consistency:num=16"),
    *("self-consistency:num=32", "self-consistency:num=64", "adaptive-consistency:num=64", "short-m:num=16,shortest=3"),
    *("short-m:num=64,shortest=5", "best-of-n:num=8", "best-of-n:num=64", "best-of-n:num=64,selection=borda"),
    *("deepconf-offline:num=64,top=0.1", "deepconf-offline:num=64,top=0.9"),
)


def parse_rescorer(text: str) -> partial[Rescored]:
    """Reads ``NAME:key=value,...`` into a function of a table.

    Raises:
        ArgumentError: an unknown name or key, or a value of another type.
    """
    name, _, options = text.partition(":")
    if name not in RESCORERS:
        raise ArgumentError(f"no pool-based strategy {name!r}; there are {', '.join(RESCORERS)}")
    known = dict(list(inspect.signature(RESCORERS[name]).parameters.items())[1:])
    values: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in known:
            raise ArgumentError(f"strategy {name} has no option {key!r}; its options are {', '.join(known) or 'none'}")
        values[key] = _read(text, key, value, type(known[key].default))
    return partial(RESCORERS[name], **values)


def _read(text: str, key: str, value: str, kind: type) -> Any:
    if kind is bool and value in ("true", "false"):
        return value == "true"
    try:
        if kind is not bool:
            return kind(value)
    except ValueError:
        pass
    raise ArgumentError(f"{text}: {key}={value!r} is no {kind.__name__}")


def pool_suite(
    pool: Pool,
    problems: Sequence[Problem],
    strategies: Sequence[str] = SHOWN,
    *,
    num: int = 64,
    seed: int = 0,
    resamples: int = 10_000,
    level: float = 0.95,
) -> dict[str, list[dict[str, Any]]]:
    """Scores a pool by strategies.

    Args:
        pool: the samples.
        problems: of one or several tasks.
        strategies: texts for `parse_rescorer`; the first is what the others are compared with.
        num: samples of each problem that are read.
        seed: of the bootstrap.
        resamples: of the bootstrap.
        level: of the intervals.

    Returns:
        ``rows``: ``task strategy problems right accuracy low high tokens_total tokens_critical pass_at``, tokens as
        means per problem, ``pass_at`` the chance that one of all the samples is right; ``differences``, as of
        `outcome.compared`.

    Raises:
        ArgumentError: an unknown strategy, or a sample that the pool lacks.
    """
    asked = {text: parse_rescorer(text) for text in strategies}
    rows: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for task in dict.fromkeys(problem.task for problem in problems):
        table = score_table(pool, [problem for problem in problems if problem.task == task], num)
        more = table_suite(table, asked, seed=seed, resamples=resamples, level=level)
        rows += [{"task": task} | row for row in more["rows"]]
        differences += [{"task": task} | row for row in more["differences"]]
    return {"rows": rows, "differences": differences}


def table_suite(
    table: ScoreTable, strategies: dict[str, partial[Rescored]], *, seed: int, resamples: int, level: float
) -> dict[str, list[dict[str, Any]]]:
    """`pool_suite` of one task, whose table is there already."""
    found = {text: rescore(table) for text, rescore in strategies.items()}
    problems, best = len(table.votes), float(pass_at(table, table.votes.shape[1]).mean())
    rows = []
    for text, scored in found.items():
        right = int(scored.right.sum())
        low, high = wilson(right, problems, level)
        rows.append(
            {"strategy": text, "problems": problems, "right": right, "accuracy": right / problems}
            | {"low": low, "high": high, "tokens_total": float(scored.total.mean())}
            | {"tokens_critical": float(scored.critical.mean()), "pass_at": best}
        )
    scores = {text: scored.right.astype(np.float64) for text, scored in found.items()}
    resampler = Resampler({name: list(values) for name, values in scores.items()}, resamples=resamples, seed=seed)
    base, *others = found
    made = {name: resampler.difference(name, base, level) for name in others}
    return {
        "rows": rows,
        "differences": [
            {"strategy": name, "than": base, "problems": problems, "difference": one.mean}
            | {"low": one.low, "high": one.high, "p": one.p}
            for name, one in made.items()
        ],
    }
