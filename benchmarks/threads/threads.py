"""Compares threads with one sequence.

``python benchmarks/threads/threads.py --threads A --sequential B C``

Models of `zoo/recipes/train_threads.py` answer the same fresh problems on `LocalEngine`: one by `fork_join`, its
sequential twins in a single call each. All are greedy, so only the problems are random.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.evals.reasoning.outcome import Outcome, table_rows
from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.suite import evaluate, greedy
from partsong.reasoning import Answer, Parameters, Run
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.strategies.fork_join import fork_join
from partsong.reasoning.threads.formats import FormatName
from partsong_zoo.products import answer_of, check, examples
from partsong_zoo.products.problems import SIZES


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    threads: str
    """Folder of the model that thinks in threads."""
    sequential: tuple[str, ...]
    """Folders of its twins."""
    trained: str = ""
    """How all were trained, for the note."""
    names: tuple[str, ...] = ("sequential",)
    """Names of the twins."""
    format: FormatName = "multiverse"
    """Tags of the threads."""
    problems: int = 1008
    """Fresh problems of all sizes."""
    timed: int = 18
    """Problems whose time is taken, one at a time and sixteen at a time."""
    repeats: int = 5
    """Rounds of timing with all models in turn; the median counts."""
    seed: int = 11
    """Seed of the problems."""


def main(config: Config) -> None:
    """Answers the problems and writes the files."""
    torch.set_num_threads(1)
    asyncio.run(_main(config))


def fresh_problems(num: int, seed: int) -> list[Problem]:
    """Draws problems, equally many of each size."""
    drawn = []
    for size in SIZES:
        drawn += examples(-(-num // len(SIZES)), seed, sizes=[size])
    return [
        Problem(
            task=f"{len(str(one.numbers[0]))} x {len(str(one.numbers[1]))} digits",
            number=number,
            question=one.question,
            gold=str(one.target),
            check=partial(_right, one.question),
            extract=answer_of,
        )
        for number, one in enumerate(drawn)
    ]


def _right(question: str, answer: str | None) -> bool:
    return answer is not None and check(question, answer)


async def _main(config: Config) -> None:
    seen: list[Answer] = []

    async def threads(run: Run, question: str, **options: Any) -> Answer:
        answer = await fork_join(
            run, question, format=config.format, teach=False, max_depth=1, thread_tokens=128, **options
        )
        seen.append(answer)
        return answer

    strategies: dict[str, Any] = {"threads": threads, **dict.fromkeys(config.names, greedy)}
    folders = (config.threads, *config.sequential)
    engines = {mode: LocalEngine(folder) for mode, folder in zip(strategies, folders, strict=True)}
    parameters, problems = Parameters(temperature=0, max_tokens=512), fresh_problems(config.problems, config.seed)
    outcomes: dict[str, list[Outcome]] = {}
    for mode, strategy in strategies.items():
        outcomes[mode] = await evaluate(problems, {mode: strategy}, engines[mode], parameters=parameters, together=32)
    asides = _asides(seen)
    timed = fresh_problems(config.timed, config.seed + 1)
    times = {(mode, together): [] for mode in strategies for together in (1, 16)}
    for _ in range(config.repeats):
        for (mode, together), taken in times.items():
            begin = time.perf_counter()
            await evaluate(timed, {mode: strategies[mode]}, engines[mode], parameters=parameters, together=together)
            taken.append((time.perf_counter() - begin) / len(timed))
    for engine in engines.values():
        await engine.close()
    _file(config, outcomes, asides, {key: sorted(taken)[len(taken) // 2] for key, taken in times.items()})


def _asides(seen: Sequence[Answer]) -> str:
    """Describes what else the threads show."""
    repeated = [answer.details["tokens_repeated"] for answer in seen]
    noted = sum(bool(answer.details["notes"]) for answer in seen)
    forked = sum(bool(answer.details["threads"]) for answer in seen)
    again = sum(count for count in repeated if count is not None)
    return (
        f"{forked} of {len(seen)} texts of the threads' model forked, {noted} not as the format wants it; keys "
        f"computed a second time after a fork: {again} (unknown in {repeated.count(None)} texts)."
    )


def _file(config: Config, modes: dict[str, list[Outcome]], asides: str, times: dict[tuple[str, int], float]) -> None:
    rows: list[dict[str, Any]] = []
    for mode, outcomes in modes.items():
        everything = [Outcome(**{**one.as_json(), "task": "all"}) for one in outcomes]
        seconds = {"seconds_alone": times[mode, 1], "seconds_of_16": times[mode, 16]}
        rows += [row | (seconds if row["task"] == "all" else {}) for row in table_rows([*everything, *outcomes])]
    by = {(row["task"], row["strategy"]): row for row in rows}
    lines = [_line(by[task, mode], by[task, "threads"]) for task in dict.fromkeys(t for t, _ in by) for mode in modes]
    columns = (
        *("problems", "model", "right, 95 %", "threads' gain", "tokens", "critical", "threads' ratio", "prompt"),
        *("ms, alone", "ms, 16 at a time"),
    )
    note = (
        f"{config.trained} {len(modes['threads'])} fresh problems, as many of each size, greedy, float32, one thread. "
        f"Means per problem. {asides} `critical`: tokens of the longest chain of calls that wait for each other; "
        "`threads' ratio`: this row's over that of the threads; `prompt`: prompt tokens that were computed. Intervals "
        f"are Wilson's. In pairs, over all problems: {'; '.join(_pairs(modes, name) for name in config.names)}. "
        f"Times: {config.timed} problems, median of {config.repeats} turns on a machine that others used as well."
    )
    title, table = "Threads against one sequence", markdown_table(columns, lines)
    file_result(config.out, __file__, rows, title, note, table)


def _pairs(modes: dict[str, list[Outcome]], name: str) -> str:
    """Describes the gain of the threads over a sequential twin on the same problems."""
    pairs = list(zip(modes["threads"], modes[name], strict=True))
    assert all(a.number == b.number and a.asked == b.asked for a, b in pairs)
    gained, lost = (sum(a.right - b.right == way for a, b in pairs) for way in (1, -1))
    mean, total = (gained - lost) / len(pairs), len(pairs)
    spread = 1.96 * ((gained + lost) / total - mean**2) ** 0.5 / total**0.5
    low, high = 100 * (mean - spread), 100 * (mean + spread)
    return (
        f"threads less {name} {100 * mean:+.2f} points (95 %: {low:+.2f} to {high:+.2f}; only the threads are right "
        f"{gained} times, only {name} {lost} times)"
    )


def _line(row: dict[str, Any], threads: dict[str, Any]) -> list[object]:
    ratio, gain = row["tokens_critical"] / threads["tokens_critical"], threads["accuracy"] - row["accuracy"]
    alone, many = (f"{1000 * row[name]:.0f}" if name in row else "" for name in ("seconds_alone", "seconds_of_16"))
    return [
        row["task"],
        row["strategy"],
        f"{row['accuracy']:.1%} ({row['low']:.1%} to {row['high']:.1%})",
        "" if row is threads else f"{100 * gain:+.1f}",
        f"{row['tokens_total']:.1f}",
        f"{row['tokens_critical']:.1f}",
        "" if row is threads else f"{ratio:.2f}",
        f"{row['prefill'] - row['prefill_cached']:.1f}",
        alone,
        many,
    ]


if __name__ == "__main__":
    main(tyro.cli(Config))
