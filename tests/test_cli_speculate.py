"""``partsong text --speculate``: the same text of a causal model, its account, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from partsong.cli import main

ASKED = ("text", "copy : dog ant cat owl fox hen =", "--model", "lists-ar", "--dtype", "float64")


def run(*args: object) -> int:
    """Exit code of a command run in this process."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def result_of(tmp_path: Path, *args: object) -> dict[str, Any]:
    assert run(*args, "--json", tmp_path / "r.json") == 0
    return json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("temperature", [0, 1])
def test_text(temperature: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*ASKED, "--temperature", temperature, "--seed", 3)
    plainly = result_of(tmp_path, *asked)
    capsys.readouterr()
    result = result_of(tmp_path, *asked, "--speculate", "ngram:length=4", "--speculate", "jacobi", "--compare")
    assert result["token_ids"] == plainly["token_ids"] == result["token_ids_serial"]
    assert (plainly["speculate"], result["speculate"]) == ([], ["ngram:length=4", "jacobi"])
    forwards = sum(result["forwards"].values())
    assert forwards + result["tokens_drafted"] - result["tokens_rejected"] == result["tokens"]
    assert forwards < result["forwards_serial"] == plainly["tokens"]
    lines = capsys.readouterr().out.splitlines()
    right = result["tokens_drafted"] - result["tokens_rejected"]
    assert lines[3] == f"ngram:length=4, jacobi: {result['tokens_drafted']} tokens guessed ahead, {right} of them right"
    assert lines[4].startswith("without drafts: ") and lines[4].endswith("the same text")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--speculate", "nrgam"], "no drafter 'nrgam'"),
        (["--speculate", "jacobi:window=0"], "Jacobi: window=0; use a positive integer"),
        (["--speculate", "ngram", "--model", "lists-mdlm"], "the family 'mdlm' is not causal"),
        (["--speculate", "ngram", "--cache", "none"], "use cache='prefix'"),
        (
            ["--speculate", "saguaro:model=lists-ar"],
            "drafts on the second of two ranks, and there are 1; give --nproc 2",
        ),
        (["--speculate", "saguaro:model=lists-ar", "--nproc", "3"], "there are 3; give --nproc 2"),
        (["--speculate", "saguaro:model=none-such", "--nproc", "2"], "none-such"),
        ([*["--speculate", "saguaro:model=lists-ar"] * 2, "--nproc", "2"], "was given 2 times, and one rank drafts"),
        (
            ["--speculate", "saguaro:model=lists-ar", "--nproc", "2", "--strategy", "layer-pipeline"],
            "--strategy layer-pipeline shares the model out, and with --speculate saguaro the first rank has all of it",
        ),
    ],
)
def test_refusals(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*ASKED, *more) == 2
    assert words in capsys.readouterr().err


def test_a_second_rank_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # At this cost the model waits for its drafts, however slow the machine is.
    drafter, asked = "saguaro:model=lists-ar,length=4,cost=0.01", (*ASKED, "--temperature", 1, "--seed", 3)
    result = result_of(tmp_path, *asked, "--nproc", 2, "--speculate", drafter, "--compare")
    assert result["token_ids"] == result["token_ids_serial"] == result_of(tmp_path, *asked)["token_ids"]
    assert (result["speculate"], result["strategy"], result["nproc"]) == ([drafter], "serial", 2)
    assert result["tokens_drafted"] > result["tokens_rejected"]
    assert f"{drafter}: {result['tokens_drafted']} token" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--model", "lists-mdlm"], "the family 'mdlm' is not causal"),
        (["--speculate", "saguaro:model=sums"], "cannot draft for this model: its vocabulary has"),
    ],
)
def test_both_ranks_refuse(more: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    mine = [] if "--speculate" in more else ["--speculate", "saguaro:model=lists-ar"]
    assert run(*ASKED, "--nproc", 2, *mine, *more) == 2
    refused = [line for line in capfd.readouterr().err.splitlines() if words in line]
    assert len(refused) == 1
