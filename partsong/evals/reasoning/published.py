"""Reads benchmarks that no package carries, by name: from a file of the user's, or from the hub.

>>> sorted(PUBLISHED)
['aime-2024', 'aime-2025', 'amc-2023', 'gpqa-diamond', 'livecodebench', 'mbpp', 'mbpp-sanitized']
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError
from partsong.evals.reasoning.judges import is_number, is_text
from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.programs import live_code, mbpp
from partsong.evals.reasoning.rows_of_files import lines_of, select
from partsong.reasoning.answers.extract import final_choice, final_number
from partsong.reasoning.answers.sandbox import Runner
from partsong.seeds import derive

__all__ = ["PUBLISHED", "HubBenchmark", "load_published"]

_BOXED = "{question}\n\nReason step by step, and put the final answer in \\boxed{{}} at the end."
_CHOICES = (
    "What is the correct answer to this question: {question}\n\nChoices:\n{choices}\n\n"
    'Reason step by step, and end with "The correct answer is (letter)".'
)

#: Makes a problem of the task's name, its number, its row and a runner of programs.
Make = Callable[..., Problem]


@dataclass(frozen=True, slots=True)
class HubBenchmark:
    """Describes a benchmark on the hub.

    Attributes:
        hub: id of the data set.
        config: its configuration, or None.
        split: its split.
        make: makes a problem of a row.
        fields: what every row has.
        runs: whether answers are programs.
    """

    hub: str
    config: str | None
    split: str
    make: Make
    fields: tuple[str, ...]
    runs: bool = False


def _contest(task: str, number: int, row: Mapping[str, Any], _: Runner | None, *, question: str) -> Problem:
    """Asks a problem of a contest, whose answer is a number."""
    gold = final_number(str(row["answer"]))
    if gold is None:
        raise ArgumentError(f"{task}: the answer of problem {number}, {str(row['answer'])[:60]!r}, is not a number")
    text = _BOXED.format(question=str(row[question]).strip())
    check = partial(is_number, gold=gold)
    return Problem(task=task, number=number, question=text, gold=gold, check=check, extract=final_number)


def _graduate(task: str, number: int, row: Mapping[str, Any], _: Runner | None) -> Problem:
    """Asks a question with four choices, in an order that depends on its number alone."""
    right = str(row["Correct Answer"]).strip()
    choices = [right, *(str(row[f"Incorrect Answer {place}"]).strip() for place in (1, 2, 3))]
    order = random.Random(derive(0, "choices", number)).sample(range(4), 4)
    letter = "ABCD"[order.index(0)]
    shown = "\n".join(f"({'ABCD'[place]}) {choices[i]}" for place, i in enumerate(order))
    text = _CHOICES.format(question=str(row["Question"]).strip(), choices=shown)
    check = partial(is_text, gold=letter)
    return Problem(task=task, number=number, question=text, gold=letter, check=check, extract=final_choice)


_CONTEST = ("problem", "answer")
_PROGRAM = ("task_id", "code", "test_list")
#: Benchmarks by name.
PUBLISHED: dict[str, HubBenchmark] = {
    "aime-2024": HubBenchmark(
        "HuggingFaceH4/aime_2024", None, "train", partial(_contest, question="problem"), _CONTEST
    ),
    "aime-2025": HubBenchmark("math-ai/aime25", None, "test", partial(_contest, question="problem"), _CONTEST),
    "amc-2023": HubBenchmark(
        "math-ai/amc23", None, "test", partial(_contest, question="question"), ("question", "answer")
    ),
    "gpqa-diamond": HubBenchmark(
        "Idavidrein/gpqa", "gpqa_diamond", "train", _graduate,
        ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
    ),
    "mbpp": HubBenchmark("google-research-datasets/mbpp", "full", "test", mbpp, (*_PROGRAM, "text"), runs=True),
    "mbpp-sanitized": HubBenchmark(
        "google-research-datasets/mbpp", "sanitized", "test", mbpp, (*_PROGRAM, "prompt"), runs=True
    ),
    "livecodebench": HubBenchmark(
        "lighteval/code_generation_lite", "v6", "test", live_code,
        ("question_id", "question_content", "public_test_cases", "private_test_cases"), runs=True,
    ),
}  # fmt: skip


def load_published(
    name: str,
    num: int | None = None,
    *,
    first: int = 0,
    data: str | Path | None = None,
    runner: Runner | None = None,
) -> list[Problem]:
    """Reads problems of a benchmark.

    Args:
        name: one of `PUBLISHED`.
        num: how many; None is all.
        first: number of the first.
        data: folder with ``NAME.jsonl``, ``.jsonl.gz``, ``.json`` (a list) or ``.csv``, with the hub's fields; None
            asks the hub, through the package ``datasets``. No code of a data set is run.
        runner: runs programs, for benchmarks whose answers are programs.

    Raises:
        ArgumentError: there is no such benchmark or file, the hub does not give it, a row lacks a field, or there is no
            runner for programs.
    """
    if name not in PUBLISHED:
        raise ArgumentError(f"no benchmark {name!r}; there are {', '.join(PUBLISHED)}")
    source = PUBLISHED[name]
    if source.runs and runner is None:
        raise ArgumentError(f"{name} is judged by running the model's programs; give a runner, such as Sandbox()")
    rows = _hub_rows(name, source) if data is None else _file_rows(name, source, Path(data))
    problems = []
    for number, row in select(rows, num, first, name):
        if missing := [field for field in source.fields if field not in row]:
            raise ArgumentError(f"{name}: row {number} has no field {missing[0]!r}; it has {', '.join(row)}")
        problems.append(source.make(name, number, row, runner))
    return problems


def _file_rows(name: str, source: HubBenchmark, folder: Path) -> Iterator[Mapping[str, Any]]:
    for suffix in (".jsonl", ".jsonl.gz"):
        if (file := folder / f"{name}{suffix}").is_file():
            return lines_of(file)
    if (file := folder / f"{name}.json").is_file():
        try:
            return iter(json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ArgumentError(f"{file} is no JSON: {error}") from None
    if (file := folder / f"{name}.csv").is_file():
        with file.open(encoding="utf-8", newline="") as lines:
            return iter(list(csv.DictReader(lines)))
    raise ArgumentError(f"{folder} has no {name}.jsonl, .jsonl.gz, .json or .csv; put there {_where(source)}")


def _hub_rows(name: str, source: HubBenchmark) -> Iterator[Mapping[str, Any]]:
    advice = f"or save {_where(source)} as {name}.jsonl in a folder, and name the folder (--data)"
    try:
        import datasets
    except ImportError:
        raise ArgumentError(
            f"{name} comes from the hub by the package datasets: pip install datasets, {advice}"
        ) from None
    try:
        rows: Any = datasets.load_dataset(source.hub, source.config, split=source.split)
    except (OSError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"the hub gives no {source.hub} ({str(error)[:120]}); try again, {advice}") from error
    return iter(rows)


def _where(source: HubBenchmark) -> str:
    config = f", configuration {source.config}," if source.config else ""
    return f"the split {source.split} of {source.hub}{config} on the hub"
