"""Runs ``partsong eval`` with a suite of decoding rules, and prints a table of rules by tasks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from partsong.cli.decoding import check_decoding, read_rule
from partsong.cli.options import Decoding
from partsong.cli.ranks import refuse_torchrun
from partsong.cli.suites.options import Eval
from partsong.cli.table import table
from partsong.errors import ArgumentError
from partsong.jobs.folder_source import find_text_model
from partsong.progress import progress

__all__ = ["SUITES", "evaluate", "summary"]

#: The suites and what they measure.
SUITES = {
    "oracle": (
        "decoding rules on tasks whose exact conditionals are known, so that every error is the rule's own: valid "
        "texts, distance from the true distribution, tokens per forward"
    ),
    "parallelbench": (
        "a model on list operations, sums and puzzles, after ParallelBench: valid answers and answer tokens per forward"
    ),
    "reasoning": (
        "thinking methods on tasks and benchmarks whose answers can be checked: accuracy with intervals, paired "
        "differences, tokens in all and one after another"
    ),
    "promises": (
        "what papers promise of their methods beside what is measured here, with intervals, cost and a verdict"
    ),
    "images": (
        "serial and parallel pictures of a model and prompts of yours: PSNR, SSIM, LPIPS, CLIP score, aesthetics, FID, "
        "seconds, and a sheet of them side by side"
    ),
    "videos": "the same for videos, with flicker and how well what is shown stays itself",
}
#: Options for suites that need a model.
_OF_MODELS = (
    *("model", "adapter", "cache", "max_new_tokens", "block_size", "open_blocks"),
    *("batch_size", "dtype", "device"),
)
#: For each suite, the columns that the table shows as accuracy and as speed.
_SHOWN = {"oracle": ("valid", "tokens_per_forward"), "parallelbench": ("accuracy", "answer_tokens_per_forward")}
_LEGENDS = {
    "oracle": (
        "valid texts / tokens per forward, every forward counted, of however many rows; all: the worst task / the "
        "geometric mean"
    ),
    "parallelbench": (
        "valid answers / answer tokens per forward, every forward counted and one end of text per answer; "
        "all: the mean / all tokens over all forwards"
    ),
}


def evaluate(options: Eval) -> dict[str, Any]:
    """Runs a suite and returns its rows."""
    refuse_torchrun("partsong eval runs in one process")
    check_decoding(options)
    start = time.perf_counter()
    rows = {"oracle": _oracle, "parallelbench": _parallelbench}[options.suite](options)
    return {
        "command": "eval",
        "suite": options.suite,
        "nproc": 1,
        "seed": options.seed,
        "seconds": time.perf_counter() - start,
        "rows": rows,
    }


def summary(result: dict[str, Any]) -> str:
    """Returns a table of rules by tasks, and a line on how to read it."""
    good, fast = _SHOWN[result["suite"]]
    rows = [*result["rows"], *_together(result)]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    cells = {(row["rule"], row["verify"], row["task"]): f"{row[good]:.1%} / {row[fast]:.2f}" for row in rows}
    # Only rules that draft have this column.
    columns = ("rule", "verify") if any(row["verify"] for row in rows) else ("rule",)
    shown = [
        {"rule": rule, "verify": str(verify), **{task: cells.get((rule, verify, task), "-") for task in tasks}}
        for rule, verify in dict.fromkeys((row["rule"], row["verify"]) for row in rows)
    ]
    header = {name: name for name in (*columns, *tasks)}
    lines = [header, *({name: line[name] for name in header} for line in shown)]
    return f"{table(lines)}\n{_LEGENDS[result['suite']]}"


def _together(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Sums up all tasks in a row per rule; the rows of the oracle suite include such rows already."""
    if result["suite"] != "parallelbench":
        return []
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        groups.setdefault(row["rule"], []).append(row)
    return [
        {
            "rule": rule,
            "verify": rows[0]["verify"],
            "task": "all",
            "accuracy": sum(row["accuracy"] for row in rows) / len(rows),
            "answer_tokens_per_forward": sum(row["answer_tokens"] for row in rows) / sum(r["forwards"] for r in rows),
        }
        for rule, rows in groups.items()
    ]


def _oracle(options: Eval) -> list[dict[str, Any]]:
    default = {field.name: field.default for field in fields(Decoding)}
    if given := [name for name in _OF_MODELS if getattr(options, name) != default.get(name)]:
        raise ArgumentError(
            f"--{given[0].replace('_', '-')} belongs to partsong eval parallelbench; the oracle suite needs no model"
        )
    import torch

    from partsong.evals.oracle import suite
    from partsong.evals.oracle.tasks import oracle_tasks

    cases = suite.cases(_rules(options.rules, probe=True), options.verify)
    _check_tasks(options.tasks, list(oracle_tasks()))
    torch.set_num_threads(options.threads or torch.get_num_threads())
    rows: list[dict[str, Any]] = []
    for rule, verify in progress(cases, "rules", unit="rule"):
        rows += suite.run(
            rules=[rule],
            verify=verify,
            tasks=options.tasks or None,
            num=options.num or 1000,
            temperature=1.0 if options.temperature is None else options.temperature,
            seed=options.seed,
        )
    return rows


def _parallelbench(options: Eval) -> list[dict[str, Any]]:
    from partsong.samplers.text import parse_cache
    from partsong.samplers.text.request import check_request

    rules = _rules(options.rules, probe=False) if options.rules else [None]
    cache = None if options.cache is None else parse_cache(options.cache)
    source = find_text_model(options.model, options.adapter)
    from partsong.evals.parallelbench import runner, tasks
    from partsong.jobs.texts import load_tokenizer, open_text_model

    tokenizer = load_tokenizer(source.folder)
    known = [task.name for task in tasks("lists" if runner.reads_lists(tokenizer) else "chat")]
    _check_tasks(options.tasks, known)
    load = {name: getattr(options, name) for name in ("adapter", "dtype", "device", "threads")}
    model = open_text_model(source.folder, zoo_name=source.zoo_name, **load)
    for rule in rules:  # checks all first, so that none is refused after another was measured
        check_request(model, [[0]], rule=rule, cache=cache, max_new_tokens=1, verify=options.verify)
    rows: list[dict[str, Any]] = []
    for rule, task in progress([(r, t) for r in rules for t in options.tasks or known], "tasks", unit="task"):
        rows += runner.run(
            model,
            tokenizer,
            names=[task],
            num=options.num or 100,
            seed=options.seed,
            rule=rule,
            cache=cache,
            temperature=options.temperature or 0.0,
            max_new_tokens=options.max_new_tokens,
            batch_size=options.batch_size or 32,
            block_size=options.block_size,
            open_blocks=options.open_blocks,
            verify=options.verify,
        )
    return rows


def _rules(texts: Sequence[str], *, probe: bool) -> list[str]:
    """Checks all rules and returns each once, so that none is refused after another was measured."""
    for text in texts:
        read_rule(text, probe=probe)
    return list(dict.fromkeys(texts))


def _check_tasks(asked: Sequence[str], known: Sequence[str]) -> None:
    for task in asked:
        if task not in known:
            raise ArgumentError(f"--tasks: no task {task!r} in this suite; there are {', '.join(known)}")
