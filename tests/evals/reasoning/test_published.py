"""Benchmarks that no package carries: a fixture of each format, made here, with its answers judged."""

from __future__ import annotations

import base64
import csv
import gzip
import json
import pickle
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partsong.cli import main
from partsong.errors import ArgumentError
from partsong.evals.reasoning.programs import packed_tests
from partsong.evals.reasoning.published import PUBLISHED, load_published
from partsong.reasoning.answers.sandbox import Sandbox

RUNNER = Sandbox(isolate=False, seconds=30.0)
CONTEST = {"id": 60, "problem": "What is $2^5$?", "solution": "It is 32.", "answer": "032", "url": "", "year": "2024"}
AMC = {"id": 0, "question": "How many legs do 3 cats have?", "answer": 12.0, "url": ""}
GRADUATE = {
    "Question": "Which is the smallest prime?\n",
    "Correct Answer": "two",
    **{f"Incorrect Answer {place}": text for place, text in enumerate(("one", "three", "nine"), 1)},
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\r\n  return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert isclose(add(0.1, 0.2), 0.3)"],
    "test_setup_code": "from math import isclose",
    "challenge_test_list": [],
}
SANITIZED = {
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "task_id": 2,
    "prompt": "Write a function to find the shared elements of two lists.",
    "code": "def shared(a, b):\n  return set(a) & set(b)",
    "test_imports": ["import math"],
    "test_list": ["assert shared((3, 4), (4, 5)) == {4}", "assert math.prod(shared([2, 3], [2, 3])) == 6"],
}


def packed(tests: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def cases(kind: str, *pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"input": given, "output": wanted, "testtype": kind} for given, wanted in pairs]


READS = {
    "question_id": "abc001_a",
    "question_content": "Print the double of a number.",
    "starter_code": "",
    "public_test_cases": json.dumps(cases("stdin", ("2\n", "4\n"))),
    "private_test_cases": packed(cases("stdin", ("7", "14"), ("0.5", "1.00"))),
    "metadata": "{}",
}
COMPLETES = {
    "question_id": "3000",
    "question_content": "Add two lists, item by item.",
    "starter_code": "class Solution:\n    def add(self, a: List[int], b: List[int]) -> List[int]:\n        ",
    "public_test_cases": json.dumps(cases("functional", ("[1, 2]\n[3, 4]", "[4, 6]"))),
    "private_test_cases": packed(cases("functional", ("[]\n[]", "[]"))),
    "metadata": '{"func_name": "add"}',
}


def write(folder: Path, name: str, *rows: dict[str, Any], suffix: str = ".jsonl") -> Path:
    file = folder / f"{name}{suffix}"
    if suffix == ".csv":
        with file.open("w", encoding="utf-8", newline="") as out:
            table = csv.DictWriter(out, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
        return folder
    text = json.dumps(rows) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    return folder


@pytest.mark.parametrize(
    ("name", "row", "right", "wrong", "suffix"),
    [
        ("aime-2024", CONTEST, "So it is \\boxed{32}.", "\\boxed{33}", ".jsonl"),
        ("aime-2025", CONTEST, "So it is \\boxed{032}.", "It is 16.", ".json"),
        ("amc-2023", AMC, "\\boxed{12}", "\\boxed{3}", ".jsonl.gz"),
    ],
)
def test_contests(tmp_path: Path, name: str, row: dict[str, Any], right: str, wrong: str, suffix: str) -> None:
    (problem,) = load_published(name, data=write(tmp_path, name, row, suffix=suffix))
    assert problem.check(problem.extract(right)) and not problem.check(problem.extract(wrong))
    assert not problem.check(None) and "\\boxed{}" in problem.question


def test_choices_are_mixed_by_the_number_alone(tmp_path: Path) -> None:
    folder = write(tmp_path, "gpqa-diamond", *[GRADUATE] * 12, suffix=".csv")
    problems = load_published("gpqa-diamond", data=folder)
    assert len({problem.gold for problem in problems}) > 1
    for problem in problems:
        lines = [line for line in problem.question.splitlines() if line.startswith("(")]
        (letter,) = [line[1] for line in lines if line.endswith(" two")]
        assert [line[1] for line in lines] == list("ABCD") and letter == problem.gold
        assert problem.check(problem.extract(f"Surely. The correct answer is ({letter})."))
        assert not problem.check(problem.extract(f"The correct answer is ({'ABCD'['ABCD'.index(letter) - 1]})."))
    later = load_published("gpqa-diamond", 2, first=5, data=folder)
    assert [problem.question for problem in later] == [problem.question for problem in problems[5:7]]


@pytest.mark.parametrize(("name", "row"), [("mbpp", MBPP), ("mbpp-sanitized", SANITIZED)])
def test_functions_are_run(tmp_path: Path, name: str, row: dict[str, Any]) -> None:
    (problem,) = load_published(name, data=write(tmp_path, name, row), runner=RUNNER)
    assert problem.check(problem.extract(f"```python\n{problem.gold}\n```"))
    assert not problem.check(problem.gold.replace("+", "-").replace("&", "|"))
    assert problem.check(f"{problem.gold}\n\nif __name__ == '__main__':\n    raise SystemExit(1)")
    for leaves in ("raise SystemExit(0)", "import os\nos._exit(0)"):  # before the tests
        assert not problem.check(leaves)
    assert all(test in problem.question for test in row["test_list"])


@pytest.mark.parametrize(
    ("code", "right"),
    [
        ("x = float(input())\nprint(int(x * 2) if x > 1 else x * 2)", True),  # 1.0 is 1.00
        ("import sys\nprint(*[2 * float(line) for line in sys.stdin])\nsys.exit()", True),
        ("print(4)", False),  # only the public test
        ("print(2 * float(input()), 0)", False),
        ("raise SystemExit(0)", False),
        ("1 / 0", False),
    ],
)
def test_programs_that_read(tmp_path: Path, code: str, right: bool) -> None:
    (problem,) = load_published("livecodebench", data=write(tmp_path, "livecodebench", READS), runner=RUNNER)
    assert problem.check(code) is right and "standard input" in problem.question


@pytest.mark.parametrize(
    ("code", "right"),
    [
        (COMPLETES["starter_code"] + "return [x + y for x, y in zip(a, b)]", True),
        ("def add(a, b):\n    return [x + y for x, y in zip(a, b)]", True),
        (COMPLETES["starter_code"] + "return [4, 6]", False),  # only the public test
        (COMPLETES["starter_code"] + "raise SystemExit", False),
    ],
)
def test_programs_that_are_completed(tmp_path: Path, code: str, right: bool) -> None:
    (problem,) = load_published("livecodebench", data=write(tmp_path, "livecodebench", COMPLETES), runner=RUNNER)
    assert problem.check(code) is right and COMPLETES["starter_code"] in problem.question


class Runs:
    """What an unsafe reader of pickles would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("it ran",)


def test_packed_tests_run_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text = base64.b64encode(zlib.compress(pickle.dumps(Runs()))).decode()
    with pytest.raises(ArgumentError, match="it names builtins.print, and only plain data is read"):
        packed_tests(text)
    assert capsys.readouterr().out == ""
    with pytest.raises(ArgumentError, match="cannot be read"):
        packed_tests("!!")


def test_the_hub_is_asked_for_what_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*given: Any, **more: Any) -> list[dict[str, Any]]:
        asked.append((*given, more))
        return [CONTEST]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_published("aime-2024")[0].gold == "32"
    assert asked == [("HuggingFaceH4/aime_2024", None, {"split": "train"})]


def test_where_there_is_no_network_it_says_where_the_file_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(
        ArgumentError, match=r"no network.*gpqa, configuration gpqa_diamond, on the hub as gpqa-diamond.jsonl.*--data"
    ):
        load_published("gpqa-diamond")


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("aime-2023", [CONTEST], "no benchmark 'aime-2023'; there are aime-2024"),
        ("aime-2024", [], "has no aime-2024.jsonl, .jsonl.gz, .json or .csv; put there the split train of"),
        ("aime-2024", [{"problem": "?"}], "row 0 has no field 'answer'; it has problem"),
        ("aime-2024", [{**CONTEST, "answer": "none"}], "the answer of problem 0, 'none', is not a number"),
        ("mbpp", [MBPP], "running the model's programs; give a runner"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, rows: list[dict[str, Any]], words: str) -> None:
    folder = write(tmp_path, name, *rows) if rows else tmp_path
    with pytest.raises(ArgumentError, match=words):
        load_published(name, data=folder)


def test_the_command_runs_programs_only_if_it_may(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, "mbpp", MBPP)
    with pytest.raises(SystemExit) as caught:
        main(["eval", "reasoning", "--tasks", "mbpp", "--data", str(folder), "--model", "sums", "--num", "1"])
    assert caught.value.code == 2 and "allow that with --run-programs" in capsys.readouterr().err


def test_every_row_names_a_split() -> None:
    assert all("/" in row.hub and row.split and row.fields for row in PUBLISHED.values())
