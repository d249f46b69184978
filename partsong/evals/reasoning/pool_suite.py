"""Scores one pool by every pool-based strategy, with intervals and paired differences, without a new token.

>>> parse_rescorer("self-consistency:num=16").keywords
{'num': 16}
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, get_type_hints

import numpy as np

from partsong.evals.reasoning.intervals import Resampler, wilson
from partsong.evals.reasoning.pool import Pool
from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.rescore import RESCORERS, StrategyResult, pass_at
from partsong.evals.reasoning.score_table import ScoreTable, score_table
from partsong.knobs import read_knobs

__all__ = ["DEFAULT_STRATEGIES", "parse_rescorer", "pool_suite", "table_suite"]

#: The strategies scored by default; they need 64 samples, with confidence.
DEFAULT_STRATEGIES = (
    *("single", "self-consistency:num=4", "self-consistency:num=8", "self-consistency:num=16"),
    *("self-consistency:num=32", "self-consistency:num=64", "adaptive-consistency:num=64", "short-m:num=16,shortest=3"),
    *("short-m:num=64,shortest=5", "best-of-n:num=8", "best-of-n:num=64", "best-of-n:num=64,selection=borda"),
    *("deepconf-offline:num=64,top=0.1", "deepconf-offline:num=64,top=0.9"),
)


def parse_rescorer(text: str) -> partial[StrategyResult]:
    """Reads ``NAME:key=value,...`` into a function of a table.

    Raises:
        ArgumentError: the name or a key is unknown, or a value has another type.
    """
    name, knobs = read_knobs(text, {name: _knobs_of(name) for name in RESCORERS}, "pool-based strategy")
    return partial(RESCORERS[name], **knobs)


def _knobs_of(name: str) -> dict[str, Any]:
    """Returns the types of a rescorer's knobs, which follow the table."""
    hints = get_type_hints(RESCORERS[name])
    return {knob: hint for knob, hint in hints.items() if knob not in ("table", "return")}


def pool_suite(
    pool: Pool,
    problems: Sequence[Problem],
    strategies: Sequence[str] = DEFAULT_STRATEGIES,
    *,
    num: int = 64,
    seed: int = 0,
    resamples: int = 10_000,
    level: float = 0.95,
) -> dict[str, list[dict[str, Any]]]:
    """Scores a pool by several strategies.

    Args:
        pool: the samples.
        problems: of one or several tasks.
        strategies: texts for `parse_rescorer`; the others are compared with the first.
        num: how many samples of each problem to use.
        seed: of the bootstrap.
        resamples: of the bootstrap.
        level: of the intervals.

    Returns:
        ``rows`` with ``task strategy problems right accuracy low high tokens_total tokens_critical pass_at``, and
        ``differences`` as of `compare_strategies`. Tokens are means per problem, and ``pass_at`` is the chance that at
        least one of the samples is right.

    Raises:
        ArgumentError: a strategy is unknown, or the pool lacks a sample.
    """
    rescorers = {text: parse_rescorer(text) for text in strategies}
    rows: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for task in dict.fromkeys(problem.task for problem in problems):
        table = score_table(pool, [problem for problem in problems if problem.task == task], num)
        more = table_suite(table, rescorers, seed=seed, resamples=resamples, level=level)
        rows += [{"task": task} | row for row in more["rows"]]
        differences += [{"task": task} | row for row in more["differences"]]
    return {"rows": rows, "differences": differences}


def table_suite(
    table: ScoreTable, strategies: dict[str, partial[StrategyResult]], *, seed: int, resamples: int, level: float
) -> dict[str, list[dict[str, Any]]]:
    """Does what `pool_suite` does, for one task whose table is given."""
    results = {text: rescore(table) for text, rescore in strategies.items()}
    problems, best = len(table.votes), float(pass_at(table, table.votes.shape[1]).mean())
    rows = []
    for text, result in results.items():
        right = int(result.right.sum())
        low, high = wilson(right, problems, level)
        rows.append(
            {"strategy": text, "problems": problems, "right": right, "accuracy": right / problems}
            | {"low": low, "high": high, "tokens_total": float(result.total.mean())}
            | {"tokens_critical": float(result.critical.mean()), "pass_at": best}
        )
    scores = {text: list(result.right.astype(np.float64)) for text, result in results.items()}
    resampler = Resampler(scores, resamples=resamples, seed=seed)
    return {"rows": rows, "differences": resampler.rows(next(iter(results)), level)}
