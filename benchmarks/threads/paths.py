"""Measures what a summary of several paths gains: ``python benchmarks/threads/paths.py --models FOLDER``.

A model of `zoo/recipes/train_paths.py` answers fresh problems on `LocalEngine` from 1, 2, 4 and 8 paths of equal
length, which the summary reads by their keys. Beside it are a vote of as many answers from one path each, and the
share of problems for which one of these is right, which is what an outside check of answers could reach.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.evals.reasoning.intervals import Resampler
from partsong.reasoning import Answer, Parameters, Run
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.strategies.fork_join import fork_join
from partsong.seeds import derive
from partsong_zoo.sums import FAMILIES, check, examples
from partsong_zoo.sums.paths import FORM, load_engine, path_answer
from partsong_zoo.sums.scoring import voted


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    models: tuple[Path, ...]
    """Folders that the recipe exported, one for each seed."""
    trained: str = ""
    """How the models were trained, for the note."""
    paths: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of paths, 1 among them."""
    problems: int = 300
    """Fresh problems of each family."""
    path_tokens: int = 64
    """Most tokens of a path."""
    temperature: float = 0.6
    """At which paths and summaries are drawn."""
    timed: int = 12
    """Problems whose time is taken, one at a time."""
    rounds: int = 5
    """Rounds of timing, with all numbers of paths in turn; the median counts."""
    seed: int = 29
    """Seed of problems and draws."""


@dataclass(frozen=True, slots=True)
class Given:
    """Holds answers to one problem.

    Attributes:
        question: the problem.
        summaries: the answer from several paths, by their number, 1 left out.
        single: answers from one path each, as many as the most paths.
        critical: mean tokens of the longest chain of calls, by number of paths.
    """

    question: str
    summaries: dict[int, str | None]
    single: list[str | None]
    critical: dict[int, float]

    def scores(self) -> dict[str, float]:
        """Returns what each way to an answer scores, by its name and number of paths."""
        single = [self.right(answer) for answer in self.single]
        scores = {"summary 1": statistics.mean(single)}
        for num, answer in self.summaries.items():
            scores[f"summary {num}"] = self.right(answer)
            scores[f"vote {num}"] = self.right(voted(self.single[:num]))
            scores[f"any {num}"] = max(single[:num])
        return scores

    def right(self, answer: str | None) -> float:
        """Returns 1 for a right answer."""
        return float(answer is not None and check(self.question, answer))


async def think(engine: LocalEngine, question: str, num: int, config: Config, seed: int) -> Answer:
    """Answers a question from some paths."""
    # A path also ends at the tag of another one, which the runtime replaces, as the paper's engine does.
    limits = Parameters(temperature=config.temperature, max_tokens=64, stop=("</think",))
    return await fork_join(
        Run(engine, seed=seed, name="paths"),
        question,
        extract=path_answer,
        format=FORM.name,
        num=num,
        teach=False,
        thread_tokens=config.path_tokens,
        parameters=limits,
    )


async def answered(engine: LocalEngine, questions: Sequence[str], config: Config) -> list[Given]:
    """Answers questions, all at the same time."""

    async def one(number: int, question: str) -> Given:
        # Single paths first, then a text of each other number of paths.
        singles, others = max(config.paths), [num for num in config.paths if num > 1]
        calls = [
            think(engine, question, num, config, derive(config.seed, "paths", number, place))
            for place, num in enumerate([1] * singles + others)
        ]
        answers = await asyncio.gather(*calls)
        single, rest = answers[:singles], dict(zip(others, answers[singles:], strict=True))
        critical = {num: float(answer.summary["tokens_critical"]) for num, answer in rest.items()}
        critical[1] = statistics.mean(answer.summary["tokens_critical"] for answer in single)
        summaries = {num: answer.answer for num, answer in rest.items()}
        return Given(question, summaries, [answer.answer for answer in single], critical)

    return list(await asyncio.gather(*(one(number, question) for number, question in enumerate(questions))))


async def timed(engine: LocalEngine, questions: Sequence[str], config: Config) -> dict[int, list[float]]:
    """Returns the seconds of each round, by number of paths."""
    seconds: dict[int, list[float]] = {num: [] for num in config.paths}
    for turn in range(config.rounds + 1):
        for num in config.paths:
            begin = time.perf_counter()
            for number, question in enumerate(questions):
                await think(engine, question, num, config, derive(config.seed, "timed", turn, number))
            # The first round warms up.
            if turn:
                seconds[num].append(time.perf_counter() - begin)
    return seconds


async def measured(folder: Path, config: Config) -> list[dict[str, Any]]:
    """Returns the rows of a model."""
    engine = load_engine(folder)
    asked = {family: [one.question for one in examples(config.problems, config.seed, [family])] for family in FAMILIES}
    try:
        given = {family: await answered(engine, questions, config) for family, questions in asked.items()}
        some = [question for pair in zip(*asked.values(), strict=True) for question in pair][: config.timed]
        seconds = await timed(engine, some, config)
    finally:
        await engine.close()
    rows = [row for family, each in given.items() for row in family_rows(each, config)]
    times = {
        num: {
            "seconds": statistics.median(taken) / len(some),
            "ratio_to_one": statistics.median(a / b for a, b in zip(taken, seconds[1], strict=True)),
        }
        for num, taken in seconds.items()
    }
    families = [family for family in given for _ in config.paths]
    return [
        {"model": folder.name, "family": family, **row, **times[row["paths"]]}
        for family, row in zip(families, rows, strict=True)
    ]


def family_rows(given: Sequence[Given], config: Config) -> list[dict[str, Any]]:
    """Returns accuracies, with differences in pairs, for each number of paths."""
    each = [one.scores() for one in given]
    scores = {name: [one[name] for one in each] for name in each[0]}
    resampled = Resampler(scores, seed=config.seed)
    rows: list[dict[str, Any]] = []
    for num in config.paths:
        row: dict[str, Any] = {"paths": num, "problems": len(given)}
        row["tokens_critical"] = statistics.mean(one.critical[num] for one in given)
        for way in ("summary", "vote", "any") if num > 1 else ("summary",):
            low, high = resampled.interval(f"{way} {num}")
            row |= {way: statistics.mean(scores[f"{way} {num}"]), f"{way}_low": low, f"{way}_high": high}
        for name, other in (("to_one", "summary 1"), ("to_vote", f"vote {num}")) if num > 1 else ():
            gain = resampled.difference(f"summary {num}", other)
            row |= {name: gain.mean, f"{name}_low": gain.low, f"{name}_high": gain.high}
        rows.append(row)
    return rows


def main(config: Config) -> None:
    """Answers the problems and writes the files."""
    torch.set_num_threads(1)
    rows = [row for folder in config.models for row in asyncio.run(measured(folder, config))]
    note = (
        f"{config.trained} {config.problems} fresh problems of each family, temperature {config.temperature}, paths of "
        f"at most {config.path_tokens} tokens, float32, one thread. *Summary*: the answer of a text of so many paths; "
        f"for one path the mean of {max(config.paths)} such texts. *Vote*: the most frequent of so many answers from "
        "one path each. *Any*: one of these is right, which only a check of answers could know. Intervals, and "
        "differences on the same problems, are 95 % by a bootstrap. *Chain*: tokens of the longest path and the "
        f"summary. *Time*: one question at a time over that of one path in the same round, median of {config.rounds} "
        f"rounds of {config.timed} problems."
    )
    columns = ("model", "family", "paths", "summary", "vote", "any", "over one", "over the vote", "chain", "time")
    table = markdown_table(columns, [_line(row) for row in rows])
    file_result(config.out, __file__, rows, "A summary of several paths", note, table)


def _line(row: dict[str, Any]) -> list[object]:
    ways = [f"{row[w]:.1%} ({row[f'{w}_low']:.1%} to {row[f'{w}_high']:.1%})" if w in row else "" for w in _WAYS]
    gains = [
        f"{100 * row[g]:+.1f} ({100 * row[f'{g}_low']:+.1f} to {100 * row[f'{g}_high']:+.1f})" if g in row else ""
        for g in ("to_one", "to_vote")
    ]
    costs = f"{row['tokens_critical']:.1f}", f"{row['ratio_to_one']:.2f}x"
    return [row["model"], row["family"], row["paths"], *ways, *gains, *costs]


_WAYS = ("summary", "vote", "any")


if __name__ == "__main__":
    main(tyro.cli(Config))
