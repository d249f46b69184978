"""``partsong think``: what it asks, draws, writes, keeps and refuses."""

from __future__ import annotations

import io
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from partsong import zoo
from partsong.cli import main
from partsong.cli.draw_threads import Threads
from partsong.reasoning import Line, Message, Run, ScriptedEngine
from partsong.reasoning.calls.virtual_time import run_virtual
from partsong.reasoning.strategies import STRATEGIES

KEYS = {
    *("command", "strategy", "nproc", "seed", "seconds", "out", "ledger"),
    *("answer", "text", "calls", "tokens_total", "tokens_critical", "tokens_accepted", "tokens_cancelled"),
    *("prefill_cached", "stopped", "engine"),
}
SORT = ("sort : dog ant cat =", "--model", "lists-ar", "--extract", "text", "--max-tokens", "9")

needs_weights = pytest.mark.skipif(
    not (zoo.MODELS["lists-ar"].folder / "config.json").is_file(), reason="the lists-ar weights are not there"
)


def run(*args: object) -> int:
    """Exit code of a command run in this process."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def result(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def typed(data: bytes) -> io.TextIOWrapper:
    """Standard input that a program writes."""
    return io.TextIOWrapper(io.BytesIO(data))


@needs_weights
@pytest.mark.parametrize("source", ["-", "nothing", "file"])
def test_a_question_comes_from_standard_input_or_a_file(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", typed(b"sort : dog ant cat =\n"))
    (tmp_path / "q.txt").write_bytes(b"sort : dog ant cat =\r\n")
    given = {"-": ("-",), "nothing": (), "file": ("--file", tmp_path / "q.txt")}[source]
    assert run("think", *given, *SORT[1:], "--strategy", "single", "--json", tmp_path / "r.json") == 0
    found = result(tmp_path / "r.json")
    assert capsys.readouterr().out.splitlines()[0] == "ant cat dog" and found["question"] == SORT[0]


def test_without_a_question_it_says_how_to_give_one(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert run("think") == 2
    assert "no question is given; write it after the command" in capsys.readouterr().err


@needs_weights
@pytest.mark.parametrize("strategy", ["single", "self-consistency:num=3"])
def test_a_text_without_a_number_is_printed(strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = (*SORT[:3], "--extract", "number", "--max-tokens", 9, "--temperature", 0)
    assert run("think", *question, "--strategy", strategy, "--json", tmp_path / "r.json") == 0
    said, found = capsys.readouterr().out.splitlines(), result(tmp_path / "r.json")
    assert (found["answer"], found["text"].strip()) == (None, "ant cat dog")
    if strategy == "single":
        assert said[0].strip() == "ant cat dog" and "so the text is printed as it is" in said[-1]
    else:
        assert [line.strip() for line in said[:8] if line.strip()] == [
            *("--- 1 of 3", "ant cat dog", "--- 2 of 3", "ant cat dog", "--- 3 of 3", "ant cat dog")
        ]
        assert said[-1] == "no vote: none of the 3 texts names an answer that can be counted"


@needs_weights
def test_it_answers_and_says_what_it_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--json", tmp_path / "r.json", "--out", tmp_path / "a.txt", "--trace", tmp_path / "t.jsonl")
    votes = "self-consistency:num=4,early_stop=false"
    assert run("think", *SORT, "--strategy", votes, *files, "--ledger", tmp_path / "l.jsonl") == 0
    said, found = capsys.readouterr().out, result(tmp_path / "r.json")
    assert said.splitlines()[0] == found["answer"] == "ant cat dog" and set(found) >= KEYS
    assert (tmp_path / "a.txt").read_text().strip() == "ant cat dog"
    calls = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert found["calls"] == len(calls) == 4
    assert found["tokens_total"] == sum(call["tokens"] for call in calls)
    records = [json.loads(line) for line in (tmp_path / "l.jsonl").read_text().splitlines()]
    assert sum(record["tokens"] for record in records) == found["tokens_total"]
    # Four samples of a prompt of seven tokens: it is computed once.
    assert (found["prefill"], found["prefill_cached"] >= 3 * 6) == (28, True)


@needs_weights
def test_a_journal_goes_on_and_is_replayed(tmp_path: Path) -> None:
    journal = ("--journal", tmp_path / "j.db")
    votes = ("--strategy", "self-consistency:num=6,early_stop=false", "--temperature", 2)
    assert run("think", *SORT, *votes, *journal, "--budget-calls", 2, "--json", tmp_path / "a.json") == 0
    assert (result(tmp_path / "a.json")["stopped"], result(tmp_path / "a.json")["details"]["votes"]) == ("budget", 2)
    assert run("think", *SORT, *votes, *journal, "--json", tmp_path / "b.json") == 0
    assert result(tmp_path / "b.json")["replayed"] == 2
    names = ("c.json", "d.json")
    for name in names:
        assert run("think", *SORT, *votes, *journal, "--replay", "--json", tmp_path / name) == 0
    assert (tmp_path / "c.json").read_bytes() == (tmp_path / "d.json").read_bytes()
    results = [{k: v for k, v in result(tmp_path / f"{name}.json").items() if k != "replayed"} for name in "bc"]
    assert results[0] == results[1]
    with sqlite3.connect(tmp_path / "j.db") as database:
        assert database.execute("SELECT COUNT(*) FROM calls").fetchone() == (6,)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("think", " "), "the question is empty"),
        (("think", "q", "--file", "f.txt"), "a question and --file f.txt are given; leave one of them out"),
        (("think", "--file", "no.txt"), "cannot read no.txt: No such file or directory"),
        (("think", "-"), "cannot read standard input: byte 4 is not UTF-8"),
        (("think", "q", "--strategy", "pdq"), "no strategy 'pdq'"),
        (("think", "q", "--strategy", "pdr:rounds=3"), "rounds"),
        (("think", "q", "--strategy", "pdr:schedule=8-4"), "end with 1"),
        (("think", "q", "--replay"), "--replay needs --journal"),
        (("think", "q", "--trace", "t.txt"), "t.txt has no known format"),
        (("think", "q", "--budget-tokens", "0"), "--budget-tokens 0: use a positive integer"),
        (("think", "q", "--budget-money", "1"), "needs a price"),
        (("think", "q", "--budget-money", "1", "--price", "cheap"), "--price 'cheap'; write PROMPT,ANSWER"),
        (("think", "q", "--max-tokens", "0"), "--max-tokens 0: use a positive integer"),
        (("think", "q", "--server", "http://127.0.0.1:9/v1"), "--server needs --model"),
        (
            ("think", "q", "--server", "http://127.0.0.1:9/v1", "--model", "m", "--threads", "1"),
            "--weights, --nproc and --share are for a model on this machine; leave them out",
        ),
        (("think", "q", "--endpoint", "completions"), "--endpoint belongs to a --server"),
        (("think", "q", "--model", "no-such-model"), "no-such-model"),
        (("think", "q", "--strategy", "edit-test-select"), "needs runner"),
    ],
)
def test_it_refuses_in_one_line(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", typed(b"caf\n\xff"))
    assert run(*args) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_it_lists_every_way_to_think(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "thinking") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(STRATEGIES)
    assert any("schedule=8-4-1" in line for line in lines)


def drawn(live: bool) -> str:
    stream = io.StringIO()
    drawing = Threads(stream, live=live)
    engine = ScriptedEngine(lambda request, draw: Line(text="so it\nis \x1b[2J seven"), chunk=1)

    async def ask() -> None:
        await Run(engine, observer=drawing).call([Message("user", ("q",))], path=("draft",))

    run_virtual(ask())
    drawing.draw()
    return stream.getvalue()


def test_threads_are_lines_where_nothing_can_be_written_over() -> None:
    begun, ended = drawn(live=False).splitlines()
    assert begun.split() == ["draft#0", "0", "..."]
    assert ended.split(maxsplit=3) == ["draft#0", "5", "done", "so it is \N{REPLACEMENT CHARACTER}[2J seven"]


def test_threads_are_drawn_in_place_and_nothing_in_them_steers_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    frames = drawn(live=True).split("\x1b[0J")
    assert frames[-1].splitlines()[0] == "0 under way, 1 ended, 5 tokens"
    assert "seven" in frames[-1] and all("\x1b[2J" not in frame for frame in frames)
