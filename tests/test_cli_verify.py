"""``--verify``: the same text with fewer forwards, its account, and what is refused on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from partsong.cli import main
from partsong_zoo.lists.model import build_model, build_tokenizer


def run(*args: object) -> int:
    """Exit code of a command run in this process."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def result_of(tmp_path: Path, *args: object) -> dict[str, Any]:
    assert run(*args, "--json", tmp_path / "r.json") == 0
    return json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the zoo's shape with its tokenizer."""
    path = tmp_path_factory.mktemp("models") / "random"
    torch.manual_seed(0)
    build_model("mdlm", heads=1, depth=1).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def test_text(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("text", "sort : dog ant cat =", "--model", folder, "--rule", "quota:by=random", "--temperature", 1)
    asked = (*asked, "--max-new-tokens", 8, "--dtype", "float64", "--seed", 3)
    plainly = result_of(tmp_path, *asked)
    capsys.readouterr()
    result = result_of(tmp_path, *asked, "--verify", 4, "--compare")
    assert result["token_ids"] == plainly["token_ids"] == result["token_ids_serial"]
    assert (plainly["verify"], result["verify"], result["forwards_serial"]) == (0, 4, plainly["forwards"]["denoise"])
    forwards = sum(result["forwards"].values())
    assert forwards < result["forwards_serial"] == plainly["rows"]
    assert forwards + result["tokens_drafted"] - result["tokens_rejected"] >= result["tokens"]
    assert result["rows"] == forwards + result["tokens_drafted"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == (
        f"verify 4: {result['rows']} rows in those forwards; {result['tokens_drafted']} tokens drafted, "
        f"{result['tokens_rejected']} of them rejected"
    )
    assert lines[4].startswith("without drafts: ")
    assert lines[4].endswith("; the same text")


def test_the_oracle_has_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--rules", "quota", "entropy-bound", "--tasks", "copy", "replace", "--num", 20, "--verify", 3)
    rows = result_of(tmp_path, "eval", "oracle", *args)["rows"]
    assert {row["verify"] for row in rows} == {3}
    assert [row["tokens_per_forward"] for row in rows if row["task"] == "copy"] == [8 / 3, 8.0]
    assert [row["rows_per_forward"] for row in rows if row["task"] == "copy"] == [8 / 3, 1.0]
    header, one, *_ = capsys.readouterr().out.splitlines()
    assert cells(header) == ["rule", "verify", "copy", "replace", "all"]
    assert cells(one)[:3] == ["quota", "3", "100.0% / 2.67"]


def test_parallelbench(folder: Path, tmp_path: Path) -> None:
    args = ("eval", "parallelbench", "--model", folder, "--tasks", "copy", "--num", 2, "--rules", "quota")
    plainly, checked = (
        result_of(tmp_path, *args, "--dtype", "float64", "--verify", verify)["rows"][0] for verify in (0, 4)
    )
    assert (plainly["verify"], checked["verify"]) == (0, 4)
    assert plainly["answer_tokens"] == checked["answer_tokens"]
    assert checked["forwards"] < plainly["forwards"] == plainly["rows"]


REFUSED = {
    "text, a negative number": (["text", "sort : dog =", "--verify", -1], "--verify -1"),
    "text, a rule that revises": (["text", "sort : dog =", "--rule", "revoke", "--verify", 2], "Revoke revises tokens"),
    "text, keys of earlier steps": (["text", "sort : dog =", "--cache", "dual", "--verify", 2], "DualCache keeps keys"),
    "oracle, a negative number": (["eval", "oracle", "--verify", -2], "--verify -2"),
    "oracle, the second rule": (["eval", "oracle", "--rules", "quota", "kl-stable", "--verify", 2], "KLStable"),
    "parallelbench, the second rule": (
        ["eval", "parallelbench", "--rules", "quota", "token-editing", "--verify", 2],
        "TokenEditing revises tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_request_is_one_line(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args, words = REFUSED[case]
    model = [] if args[1] == "oracle" else ["--model", folder, "--adapter", "mdlm"]
    assert run(*args, *model) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("partsong: error: ")
    assert err.count("\n") == 1
    assert words in err
