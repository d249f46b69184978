"""``partsong eval reasoning``: its rows, what it keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from partsong.cli import main
from partsong.cli.eval import SUITES
from partsong.evals.reasoning.intervals import wilson
from tests.tiny_models.text import word_tokenizer

STRATEGIES = ("greedy", "self-consistency:num=3", "sequential-refinement:rounds=2")


def run(*args: object) -> int:
    """Exit code of a command run in this process."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that writes digits."""
    path = tmp_path_factory.mktemp("digits")
    split = pre_tokenizers.WhitespaceSplit()
    word_tokenizer([*"0123456789", "<unk>", "<eos>"], split, unk_token="<unk>", eos_token="<eos>").save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=12, max_position_embeddings=512, eos_token_id=11, initializer_range=0.5)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def evaluate(folder: Path, tmp_path: Path, *args: object) -> dict[str, Any]:
    asked = ("--tasks", "multiplication", "--num", 4, "--strategies", *STRATEGIES, "--max-tokens", 8)
    assert run("eval", "reasoning", *asked, "--model", folder, "--json", tmp_path / "r.json", *args) == 0
    return json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))


def test_rows_and_differences(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluate(folder, tmp_path, "--plot", tmp_path / "p.svg")
    assert (result["command"], result["suite"]) == ("eval", "reasoning")
    assert [row["strategy"] for row in result["rows"]] == list(STRATEGIES)
    for row in result["rows"]:
        assert (row["low"], row["high"]) == pytest.approx(wilson(row["right"], 4))
        assert row["tokens_total"] >= row["tokens_critical"] > 0 and row["on"] == "engine"
    assert [row["strategy"] for row in result["differences"]] == list(STRATEGIES[1:])
    shown = capsys.readouterr().out
    assert all(name in shown for name in STRATEGIES) and "Wilson" in shown
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


def test_a_pool_gives_what_live_samples_give_and_a_rerun_asks_nothing(folder: Path, tmp_path: Path) -> None:
    live = evaluate(folder, tmp_path)["rows"]
    work = ("--samples", 3, "--work", tmp_path / "work")
    pooled = evaluate(folder, tmp_path, *work)["rows"]
    assert [row["on"] for row in pooled] == ["engine", "pool", "engine"]
    assert [(row["right"], row["unanswered"]) for row in pooled] == [(row["right"], row["unanswered"]) for row in live]
    before = (tmp_path / "work" / "pool.jsonl").read_bytes()
    assert evaluate(folder, tmp_path, *work)["rows"] == pooled
    assert (tmp_path / "work" / "pool.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tasks", "chess"), "no task 'chess'; there are countdown, sudoku, word-problems"),
        (("--strategies", "guess"), "no strategy 'guess'"),
        (("--strategies", "edit-test-select"), "needs runner"),
        (("--num", "0"), "--num 0: use a positive integer"),
        (("--budget-tokens", "0"), "--budget-tokens 0: use a positive integer"),
        (("--server", "http://127.0.0.1:9/v1"), "--server needs --model"),
    ],
)
def test_it_refuses_in_one_line(args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", "reasoning", *args) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_it_is_listed() -> None:
    assert "reasoning" in SUITES
