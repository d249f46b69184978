"""``partsong eval``: its rows, its table and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from partsong.cli import main
from partsong.cli.eval import SUITES
from partsong.evals.parallelbench import problems, score
from partsong_zoo.lists.model import build_model, build_tokenizer


def run(*args: object) -> int:
    """Exit code of a command run in this process."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    code = caught.value.code
    assert isinstance(code, int)
    return code


def evaluate(tmp_path: Path, *args: object) -> dict[str, Any]:
    assert run("eval", *args, "--json", tmp_path / "r.json") == 0
    return json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_oracle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--rules", "quota", "entropy-bound:gamma=0.1", "--tasks", "copy", "insert", "--num", 60, "--seed", 5)
    result = evaluate(tmp_path, "oracle", *args)
    assert (result["command"], result["suite"], result["seed"], result["nproc"]) == ("eval", "oracle", 5, 1)
    rows = {(row["rule"], row["task"]): row for row in result["rows"]}
    assert list(rows) == [(rule, task) for rule in (args[1], args[2]) for task in ("copy", "insert", "all")]
    assert rows["quota", "all"]["tokens_per_forward"] == pytest.approx(1.0)
    bound = rows["entropy-bound:gamma=0.1", "all"]
    assert bound["valid"] == 1.0
    each = [rows["entropy-bound:gamma=0.1", task]["tokens_per_forward"] for task in ("copy", "insert")]
    assert bound["tokens_per_forward"] == pytest.approx(math.sqrt(each[0] * each[1]))
    assert each[0] == 8.0  # all tokens of a copy are certain
    header, one, two, legend = capsys.readouterr().out.splitlines()
    assert cells(header) == ["rule", "copy", "insert", "all"]
    assert cells(one) == ["quota", "100.0% / 1.00", "100.0% / 1.00", "100.0% / 1.00"]
    shown = [f"100.0% / {value:.2f}" for value in (*each, bound["tokens_per_forward"])]
    assert cells(two) == ["entropy-bound:gamma=0.1", *shown]
    assert "geometric mean" in legend


def test_seed_and_temperature_reach_the_oracle(tmp_path: Path) -> None:
    args = ("oracle", "--rules", "threshold:threshold=0", "--tasks", "insert", "--num", 12)
    first = evaluate(tmp_path, *args)["rows"][0]
    assert evaluate(tmp_path, *args)["rows"][0] == first
    assert evaluate(tmp_path, *args, "--seed", 1)["rows"][0] != first
    cold = evaluate(tmp_path, *args, "--temperature", 0)["rows"][0]
    assert cold["total_variation"] > 0.9  # always the same text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the zoo's shape with its tokenizer."""
    path = tmp_path_factory.mktemp("models") / "random"
    torch.manual_seed(0)
    build_model("mdlm", heads=1, depth=1).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def test_parallelbench(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--model", folder, "--tasks", "copy", "sort", "--num", 3, "--rules", "quota", "quota:per_step=4")
    result = evaluate(tmp_path, "parallelbench", *args, "--cache", "none", "--seed", 2)
    rows = {(row["rule"], row["task"]): row for row in result["rows"]}
    assert list(rows) == [(rule, task) for rule in ("quota", "quota:per_step=4") for task in ("copy", "sort")]
    assert all((row["num"], row["language"], row["cache"]) == (3, "lists", "none") for row in rows.values())
    assert rows["quota", "copy"]["forwards"] >= 3 * rows["quota:per_step=4", "copy"]["forwards"]
    header, *lines, legend = capsys.readouterr().out.splitlines()
    assert cells(header) == ["rule", "copy", "sort", "all"]
    both = [rows["quota", task] for task in ("copy", "sort")]
    speed = sum(row["answer_tokens"] for row in both) / sum(row["forwards"] for row in both)
    assert cells(lines[0])[3] == f"{sum(row['accuracy'] for row in both) / 2:.1%} / {speed:.2f}"
    assert "answer tokens per forward" in legend
    # The suite asks what it says it asks: a right answer to one of its questions is right.
    problem = problems("copy", 3, 2, language="lists")[0]
    assert score(problem, problem.answer)["score"] == 1.0


REFUSED = {
    "unknown suite": (["sound"], "sound"),
    "no suite": ([], "oracle"),
    "unknown rule": (["oracle", "--rules", "quota", "quoter"], "quoter"),
    "unknown task": (["oracle", "--tasks", "juggle"], "shuffle"),
    "no texts": (["oracle", "--num", 0], "--num 0"),
    "oracle with a model": (["oracle", "--model", "lists-ar"], "--model belongs to"),
    "oracle in batches": (["oracle", "--batch-size", 4], "--batch-size belongs to"),
    "negative temperature": (["oracle", "--temperature", -1], "--temperature -1"),
    "rule that needs a function": (["parallelbench", "--rules", "dependency"], "probe"),
    "rule without its knobs": (["parallelbench", "--rules", "insert-delete"], "needs delete_token, split_token"),
    "unknown cache": (["parallelbench", "--cache", "all"], "vicinity"),
    "unknown model": (["parallelbench", "--model", "nope"], "no model 'nope'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_request_is_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    args, words = REFUSED[case]
    assert run("eval", *args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("partsong: error: ")
    assert err.count("\n") == 1
    assert words in err


def test_task_of_another_language_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", "parallelbench", "--model", folder, "--tasks", "sudoku") == 2
    err = capsys.readouterr().err
    assert "'sudoku'" in err and "latin_square" in err and err.count("\n") == 1


def test_list_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "suites") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SUITES)
