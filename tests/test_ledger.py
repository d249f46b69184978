"""The ledger: what is counted, nested, written and summed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from partsong.errors import ArgumentError
from partsong.ledger import FIELDS, Ledger, active, count


def test_steps_and_summary() -> None:
    with Ledger() as ledger:
        count(forwards=2, bytes_sent=64, messages=1)
        count(forwards=1, seconds_compute=0.5)
        ledger.step(phase="denoise")
        count(tokens=7)
        ledger.step()
    assert [record["step"] for record in ledger.records] == [0, 1]
    assert ledger.records[0]["forwards"] == 3
    assert ledger.records[0]["phase"] == "denoise"
    assert set(FIELDS) <= set(ledger.records[1])
    assert ledger.summary() == {
        **dict.fromkeys(FIELDS, 0),
        "steps": 2, "forwards": 3, "bytes_sent": 64, "messages": 1, "seconds_compute": 0.5, "tokens": 7,
    }  # fmt: skip


def test_summary_holds_the_open_record_too() -> None:
    with Ledger() as ledger:
        count(forwards=1)
        assert ledger.summary()["forwards"] == 1
        assert ledger.summary()["steps"] == 0


def test_what_is_left_at_the_end_becomes_a_record() -> None:
    with Ledger() as ledger:
        count(forwards=1)
    assert ledger.records[0]["note"] == "after the last step"
    with Ledger() as untouched:
        pass
    assert untouched.records == []


def test_nesting_counts_in_the_innermost() -> None:
    assert active() is None
    count(forwards=1)  # nobody listens
    with Ledger() as outer:
        count(forwards=1)
        with Ledger() as inner:
            assert active() is inner
            count(forwards=10)
        assert active() is outer
        count(forwards=1)
    assert active() is None
    assert outer.summary()["forwards"] == 2
    assert inner.summary()["forwards"] == 10


def test_ends_when_the_block_fails() -> None:
    ledger = Ledger()

    def fail() -> None:
        with ledger:
            count(forwards=1)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert active() is None
    assert ledger.summary()["forwards"] == 1
    with ledger:  # may be used again, one block after the other
        count(forwards=1)
    assert ledger.summary()["forwards"] == 2


def test_cannot_be_entered_twice() -> None:
    with Ledger() as ledger, pytest.raises(ArgumentError, match="already active"):
        ledger.__enter__()


def test_unknown_field() -> None:
    with Ledger() as ledger, pytest.raises(ArgumentError, match=r"does not count 'bytes'; it counts .*bytes_sent"):
        count(bytes=1)
    assert ledger.records == []


def test_rank(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert Ledger().rank == 3
    assert Ledger(rank=1).rank == 1


def test_file_is_appended_to(tmp_path) -> None:
    path = tmp_path / "new" / "ledger.jsonl"
    for forwards in (1, 2):
        with Ledger(path) as ledger:
            count(forwards=forwards)
            ledger.step()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["forwards"] for line in lines] == [1, 2]


WRITER = """
import sys
from partsong.ledger import Ledger, count
with Ledger(sys.argv[1], rank=int(sys.argv[2])) as ledger:
    for step in range(300):
        count(forwards=1, bytes_sent=step)
        ledger.step(text="x" * (step % 97))
"""


def test_several_processes_share_a_file(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    ranks = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(rank)]) for rank in range(4)]
    assert [rank.wait(timeout=60) for rank in ranks] == [0] * 4
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 1200
    for rank in range(4):
        own = [line for line in lines if line["rank"] == rank]
        assert [line["step"] for line in own] == list(range(300))
        assert all(line["bytes_sent"] == line["step"] for line in own)
