"""Measures decoding rules on tasks where the model is never wrong: valid texts, their distribution, and the cost.

Every error here is the rule's own. Every forward counts, also those that only check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from partsong.errors import ArgumentError
from partsong.evals.oracle.model import OracleModel
from partsong.evals.oracle.tasks import oracle_tasks
from partsong.samplers.text.decode import decode
from partsong.samplers.text.registry import parse_rule

__all__ = ["DEFAULT_RULES", "run"]

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
)


def run(
    *,
    rules: Sequence[str] = DEFAULT_RULES,
    tasks: Sequence[str] | None = None,
    num: int = 1000,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Decodes every task with every rule.

    Args:
        rules: "NAME:key=value" each.
        tasks: names of `oracle_tasks`; None is all of them.
        num: texts per rule and task; shares of them have a standard error of at most ``0.5 / sqrt(num)``.
        temperature: of the draws.
        seed: of the draws.

    Returns:
        A row per rule and task: ``rule task valid total_variation tokens_per_forward certificate edits num``. Another
        row per rule has the task "all", the least ``valid`` and the geometric mean of ``tokens_per_forward``. A perfect
        sampler has a ``total_variation`` of about sqrt(M / (2 pi num)) for M valid texts.

    Raises:
        ArgumentError: a rule or a task is unknown.

    Source: the tasks follow ParallelBench, arXiv 2510.04767.

    >>> run(rules=["quota"], tasks=["copy"], num=2)[0]["valid"]
    1.0
    """
    known = oracle_tasks()
    for task in tasks or ():
        if task not in known:
            raise ArgumentError(f"no oracle task {task!r}; the tasks are {', '.join(known)}")
    parsed = {text: parse_rule(text) for text in rules}
    rows = []
    for text, rule in parsed.items():
        cells = [_cell(text, rule, known[task], num, temperature, seed) for task in tasks or known]
        speed = math.exp(sum(math.log(cell["tokens_per_forward"]) for cell in cells) / len(cells))
        valid = min(cell["valid"] for cell in cells)
        rows += [*cells, {"rule": text, "task": "all", "valid": valid, "tokens_per_forward": speed, "num": num}]
    return rows


def _cell(text: str, rule: Any, support: Any, num: int, temperature: float, seed: int) -> dict[str, Any]:
    model = OracleModel(support)
    decoded = decode(
        model,
        [[]] * num,
        rule=rule,
        max_new_tokens=support.length,
        block_size=support.length,
        temperature=temperature,
        seed=seed,
        probe=model.probe_of if rule.probes else None,
    )
    texts, summary = torch.tensor(decoded.tokens), decoded.summary()
    return {
        "rule": text,
        "task": support.name,
        "valid": float(support.contains(texts).double().mean()),
        "total_variation": support.total_variation(texts),
        "tokens_per_forward": summary["tokens_per_forward_all"],
        "certificate": summary["certificate"],
        "edits": summary["edits"],
        "num": num,
    }
