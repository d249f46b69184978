"""Compares a written search with direct answers: ``python benchmarks/thinking/backtrack.py --runs FOLDER``.

The models are those of `zoo/recipes/train_search.py`. Fresh countdowns and sudokus are answered by one long search,
with its dead ends, and by n direct answers of which one has to be right, as a check of the answers finds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.evals.reasoning.intervals import Resampler
from partsong_zoo.folders import load_folder
from partsong_zoo.search.model import LANGUAGES, flops
from partsong_zoo.search.problems import TASKS, SearchProblem
from partsong_zoo.search.training import Way
from partsong_zoo.sums.sampling import Draft, sample


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    runs: tuple[Path, ...]
    """Folders that the recipe wrote, one for each seed."""
    tasks: tuple[str, ...] = tuple(TASKS)
    """Kinds of problems."""
    trained: str = ""
    """How the models were trained, for the note."""
    problems: int = 300
    """Fresh problems of each task."""
    direct: int = 32
    """Direct answers of each problem."""
    search: int = 8
    """Searches of each problem."""
    seed: int = 23
    """Seed of problems and draws."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Holds what a model wrote, for each problem.

    Attributes:
        greedy: its likeliest text.
        drawn: its draws at temperature 1.
        right: how many of the draws are right.
        right_greedy: whether the likeliest text is right.
        prompt_flops: the mean operations of reading a prompt.
        greedy_flops: those of the likeliest text, after the prompt.
        drawn_flops: those of a draw, after the prompt.
    """

    greedy: list[Draft]
    drawn: list[list[Draft]]
    right: list[int]
    right_greedy: list[bool]
    prompt_flops: float
    greedy_flops: float
    drawn_flops: float

    def tokens(self, num: int) -> float:
        """Returns the mean tokens of some draws, or of the likeliest text for 0."""
        texts = [text for each in self.drawn for text in each] if num else self.greedy
        return max(1, num) * sum(text.written for text in texts) / len(texts)

    def flops(self, num: int) -> float:
        """Returns the mean operations of some draws, whose prompt is read once, or of the likeliest text for 0."""
        return self.prompt_flops + (num * self.drawn_flops if num else self.greedy_flops)

    def scores(self, num: int) -> list[float]:
        """Returns for each problem the chance that one of some draws is right; for 0 whether the likeliest text is."""
        if not num:
            return [float(right) for right in self.right_greedy]
        drawn = len(self.drawn[0])
        return [1 - math.comb(drawn - right, num) / math.comb(drawn, num) for right in self.right]


def answers(folder: Path, task: str, way: Way, fresh: Sequence[SearchProblem], num: int, seed: int) -> Answers:
    """Lets a model answer."""
    model, judge, words = load_folder(folder), TASKS[task].is_right, LANGUAGES[task]
    longest = max(len(words.encode(one.direct if way == "direct" else one.search)) for one in fresh)
    most = min(TASKS[task].most, longest + 16)
    greedy = sample(model, [one.question for one in fresh], seed=None, most=most, words=words)
    flat = sample(
        model, [one.question for one in fresh for _ in range(num)], seed=seed, most=most, words=LANGUAGES[task]
    )
    drawn = [flat[low : low + num] for low in range(0, len(flat), num)]

    def more(texts: Sequence[Draft]) -> float:
        """Returns the mean operations after the prompt."""
        return sum(flops(model, one.read, one.written) - flops(model, one.read, 1) for one in texts) / len(texts)

    return Answers(
        greedy,
        drawn,
        [sum(judge(one.question, text.text) for text in each) for one, each in zip(fresh, drawn, strict=True)],
        [judge(one.question, text.text) for one, text in zip(fresh, greedy, strict=True)],
        sum(flops(model, one.read, 1) for one in greedy) / len(greedy),
        more(greedy),
        more(flat),
    )


def vote(question: str, task: str, texts: Sequence[Draft]) -> bool:
    """Says whether the most frequent answer, the first of equals, is right."""
    found: dict[str, list[str]] = {}
    for text in texts:
        if (answer := TASKS[task].answer_of(question, text.text)) is not None:
            found.setdefault(answer, []).append(text.text)
    return bool(found) and TASKS[task].is_right(question, max(found.values(), key=len)[0])


def counts(most: int) -> list[int]:
    """Lists powers of two up to `most`."""
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def compared(run: Path, task: str, config: Config) -> list[dict[str, Any]]:
    """Returns the rows of a task's two models."""
    fresh = TASKS[task].fresh(config.problems, config.seed)
    counted: dict[Way, int] = {"search": config.search, "direct": config.direct}
    both = {
        way: answers(run / "export" / f"{task}-{way}", task, way, fresh, num, config.seed)
        for way, num in counted.items()
    }
    equal = as_dear(both["search"], both["direct"], config.direct)
    sizes: dict[Way, list[int]] = {
        "search": [0, *counts(config.search)],
        "direct": sorted({0, *counts(config.direct), *equal.values()}),
    }
    scores = {f"{way} {num}": both[way].scores(num) for way, nums in sizes.items() for num in nums}
    resampled = Resampler(scores, seed=config.seed)
    rows: list[dict[str, Any]] = []
    for way, num in ((way, num) for way, nums in sizes.items() for num in nums):
        one, name = both[way], f"{way} {num}"
        (low, high), gain = resampled.interval(name), resampled.difference(name, "search 0")
        votes = [vote(problem.question, task, each[:num]) for problem, each in zip(fresh, one.drawn, strict=True)]
        rows.append(
            {
                "run": run.name, "task": task, "model": way, "n": num, "problems": len(fresh),
                "right": sum(scores[name]) / len(fresh), "low": low, "high": high,
                "voted": sum(votes) / len(votes) if num else None,
                "tokens": one.tokens(num), "flops": one.flops(num),
                "equal": [what for what, n in equal.items() if way == "direct" and n == num],
                "to_search": gain.mean, "to_search_low": gain.low, "to_search_high": gain.high,
                "finished": sum(text.finished for text in one.greedy) / len(fresh),
            }
        )  # fmt: skip
    return rows


def as_dear(search: Answers, direct: Answers, most: int) -> dict[str, int]:
    """Returns how many direct answers, one at least, cost no more than the likeliest search, by what is counted."""
    ratios = {
        "tokens": search.tokens(0) / direct.tokens(1),
        "operations": search.greedy_flops / direct.drawn_flops,
    }
    return {what: min(most, max(1, math.floor(ratio))) for what, ratio in ratios.items()}


def main(config: Config) -> None:
    """Answers the problems and writes the files."""
    torch.set_num_threads(1)
    rows = [row for run in config.runs for task in config.tasks for row in compared(run, task, config)]
    note = (
        f"{config.trained} {config.problems} fresh problems of each task, float32. `right`: the likeliest text (n "
        "empty), or one of n draws at temperature 1 at least, which a check of answers finds; chances over "
        f"{config.direct} draws of the direct model and {config.search} of the search. `voted`: the most frequent "
        "answer of n draws, without that check. Tokens are those written, operations (additions and products, those of "
        "attention counted) have the prompt once. Intervals, and differences to the likeliest search on the same "
        "problems, are 95 % by a paired bootstrap. `=`: the most direct answers that cost no more than that search."
    )
    columns = ("run", "task", "model", "n", "right, 95 %", "to one search, paired", "voted", "tokens", "MFLOP", "=")
    table = markdown_table(columns, [_line(row) for row in rows])
    file_result(config.out, __file__, rows, "A written search against direct answers", note, table)


def _line(row: dict[str, Any]) -> list[object]:
    right = f"{row['right']:.1%} ({row['low']:.1%} to {row['high']:.1%})"
    gain = f"{row['to_search']:+.1%} ({row['to_search_low']:+.1%} to {row['to_search_high']:+.1%})"
    own = row["model"] == "search" and not row["n"]
    voted = "" if row["voted"] is None else f"{row['voted']:.1%}"
    costs = f"{row['tokens']:.0f}", f"{row['flops'] / 1e6:.0f}", " and ".join(row["equal"])
    return [row["run"], row["task"], row["model"], row["n"] or "", right, "" if own else gain, voted, *costs]


if __name__ == "__main__":
    main(tyro.cli(Config))
