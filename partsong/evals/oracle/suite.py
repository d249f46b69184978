"""Measures decoding rules on tasks where the model is never wrong: valid texts, their distribution, and the cost.

Every error here is the rule's own. Every forward counts, including those that only check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from partsong.errors import ArgumentError
from partsong.evals.oracle.model import OracleModel, Support
from partsong.evals.oracle.tasks import oracle_tasks
from partsong.samplers.text.caches import NoCache
from partsong.samplers.text.decode import decode
from partsong.samplers.text.registry import parse_rule
from partsong.samplers.text.request import check_verify

__all__ = ["DEFAULT_RULES", "VERIFIED", "cases", "run"]

#: The rules measured by default: ours at their defaults, and published settings that differ from them.
DEFAULT_RULES = (
    "entropy-bound",
    "entropy-bound:gamma=0.5",
    "entropy-bound:gamma=1",
    "quota",
    "quota:per_step=4",
    "llada",
    "threshold",
    "threshold:threshold=0.7",
    "factor",
    "factor:factor=1",
    "entropy",
    "entropy:threshold=0.5",
    "hierarchy",
    "kl-stable",
    "token-editing",
    "revoke",
    "dependency",
    "variation-bound",
)

#: Rules whose drafts are checked by default, each with how many: one token a step in an order that no model chooses,
#: which drafts foresee best, the rule that `decode` takes, and the one that sees independent tokens.
VERIFIED = (
    ("quota:by=random", 4),
    ("quota:by=random", 8),
    ("quota:by=random", 16),
    ("entropy-bound", 8),
    ("variation-bound", 8),
)


def cases(rules: Sequence[str] = (), verify: int = 0) -> list[tuple[str, int]]:
    """Lists what to measure, rules with their number of drafts: those asked for, or the default ones.

    Raises:
        ArgumentError: a rule is unknown.
        UnsupportedError: drafts of a rule cannot be checked.

    >>> cases(["quota"], verify=2)
    [('quota', 2)]
    """
    if not rules and not verify:
        return [*((rule, 0) for rule in DEFAULT_RULES), *VERIFIED]
    asked = list(rules or dict.fromkeys(rule for rule, _ in VERIFIED))
    for rule in asked:
        check_verify(verify, parse_rule(rule), NoCache(), OracleModel.adapter)
    return [(rule, verify) for rule in asked]


def run(
    *,
    rules: Sequence[str] = DEFAULT_RULES,
    tasks: Sequence[str] | None = None,
    num: int = 1000,
    temperature: float = 1.0,
    seed: int = 0,
    verify: int = 0,
) -> list[dict[str, Any]]:
    """Decodes every task with every rule.

    Args:
        rules: "NAME:key=value" each.
        tasks: names of `oracle_tasks`; None is all of them.
        num: texts per rule and task; shares of them have a standard error of at most ``0.5 / sqrt(num)``.
        temperature: of the draws.
        seed: of the draws.
        verify: how many steps to draft and check, as in `decode`.

    Returns:
        A row per rule and task: ``rule verify task valid total_variation tokens_per_forward rows_per_forward
        certificate variation edits num``. ``variation`` is the mean over texts of `Tally.variation`, which bounds
        ``total_variation``. Another row per rule has the task "all", the least ``valid``, the geometric mean of
        ``tokens_per_forward`` and the mean of ``rows_per_forward``. A perfect sampler has a ``total_variation`` of
        about sqrt(M / (2 pi num)) for M valid texts.

    Raises:
        ArgumentError: a rule or a task is unknown.
        UnsupportedError: drafts of a rule cannot be checked.

    Source: the tasks follow ParallelBench, arXiv 2510.04767.

    >>> run(rules=["quota"], tasks=["copy"], num=2)[0]["valid"]
    1.0
    """
    known = oracle_tasks()
    for task in tasks or ():
        if task not in known:
            raise ArgumentError(f"no oracle task {task!r}; the tasks are {', '.join(known)}")
    parsed = {text: parse_rule(text) for text, _ in cases(rules, verify)}
    rows = []
    for text, rule in parsed.items():
        head = {"rule": text, "verify": verify}
        cells = [head | _cell(rule, known[task], num, temperature, seed, verify) for task in tasks or known]
        rows += [*cells, head | _together(cells) | {"num": num}]
    return rows


def _together(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums up the tasks of a rule."""
    return {
        "task": "all",
        "valid": min(cell["valid"] for cell in cells),
        "tokens_per_forward": math.exp(sum(math.log(cell["tokens_per_forward"]) for cell in cells) / len(cells)),
        "rows_per_forward": sum(cell["rows_per_forward"] for cell in cells) / len(cells),
    }


def _mean(bounds: list[float | None]) -> float | None:
    """Returns the mean of the texts' bounds; None where one of them has none."""
    return None if None in bounds else sum(bound for bound in bounds if bound is not None) / len(bounds)


def _cell(rule: Any, support: Support, num: int, temperature: float, seed: int, verify: int) -> dict[str, Any]:
    model = OracleModel(support)
    decoded = decode(
        model,
        [[]] * num,
        rule=rule,
        max_new_tokens=support.length,
        block_size=support.length,
        temperature=temperature,
        seed=seed,
        probe=model.probe_for(rule),
        verify=verify,
    )
    texts, summary = torch.tensor(decoded.tokens), decoded.summary()
    return {
        "task": support.name,
        "valid": float(support.contains(texts).double().mean()),
        "total_variation": support.total_variation(texts),
        "tokens_per_forward": summary["tokens_per_forward_all"],
        "rows_per_forward": summary["rows"] / sum(summary["forwards"].values()),
        "certificate": summary["certificate"],
        "variation": _mean([tally.variation for tally in decoded.tallies]),
        "edits": summary["edits"],
        "num": num,
    }
