"""Traces that are kept on disk: equal to fresh ones, never stale, and no harm where the disk does harm."""

from __future__ import annotations

import functools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from partsong import DisplacedPatch, Ring, ShardedWeights, Ulysses
from partsong.parallel.plan.remembered_shapes import RememberedShapes
from partsong.parallel.strategy import Strategy
from partsong.planner import Subject, kept_traces
from partsong.planner.measuring import SMALL, probe_call, probe_model
from partsong.planner.trace import CallTrace, trace_calls

TINY = Subject(
    name="tiny",
    build=functools.partial(probe_model, small=True),
    call=lambda size: probe_call(SMALL, torch.float32, small=True),
    steps=4,
    height=64,
    width=64,
    settings="tiny",
    uniform=True,
)


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks of each call that was really traced, with an empty folder for what is kept."""
    monkeypatch.setenv("PARTSONG_TRACES", str(tmp_path))
    seen: list[int] = []

    def counting(module: Any, strategies: Any, ranks: int, *args: Any, **kwargs: Any) -> CallTrace:
        seen.append(ranks)
        return trace_calls(module, strategies, ranks, *args, **kwargs)

    monkeypatch.setattr(kept_traces, "trace_calls", counting)
    return seen


def find(
    *mix: Strategy,
    subject: Subject = TINY,
    ranks: int | None = None,
    tokens: int = SMALL,
    dtype: torch.dtype = torch.float32,
) -> CallTrace:
    inputs = probe_call(tokens, dtype, small=True)
    ranks = ranks or (2 if mix else 1)
    return kept_traces.find_trace(subject, mix, ranks, inputs, shapes=RememberedShapes(), whole=False)


def entry_in(folder: Path) -> Path:
    (file,) = folder.rglob("*.json")
    return file


@pytest.mark.parametrize("mix", [(), (Ulysses(),), (Ring(),), (DisplacedPatch(),), (ShardedWeights(),)], ids=repr)
def test_what_is_kept_is_what_was_traced(mix: tuple[Strategy, ...], traced: list[int]) -> None:
    first = find(*mix)
    assert find(*mix) == first
    assert len(traced) == 1


def test_whatever_a_trace_depends_on_is_traced_again(traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"ranks": 4},
        {"tokens": 2 * SMALL},
        {"dtype": torch.bfloat16},
        {"subject": replace(TINY, settings="another")},
        {"subject": replace(TINY, build=lambda: probe_model(small=True).double()), "dtype": torch.float64},
    ]
    for case in cases:
        find(Ulysses(), **case)
    find(Ulysses(waves=1))
    monkeypatch.setenv("PARTSONG_ATTENTION", "naive")
    find(Ulysses())
    assert len(traced) == len(cases) + 2
    monkeypatch.delenv("PARTSONG_ATTENTION")
    for case in cases:
        find(Ulysses(), **case)
    assert len(traced) == len(cases) + 2


def test_a_changed_source_is_traced_again(traced: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = tmp_path / "house"
    source = house / "parallel" / "exchange" / "ring.py"
    source.parent.mkdir(parents=True)
    monkeypatch.setattr(kept_traces, "_HOUSE", house)
    try:
        for text in ("one", "two", "one"):
            source.write_text(text, encoding="utf-8")
            kept_traces._version.cache_clear()
            find()
        monkeypatch.setattr(kept_traces, "_installed", lambda package: f"{package} of tomorrow")
        kept_traces._version.cache_clear()
        find()
    finally:
        kept_traces._version.cache_clear()
    assert len(traced) == 3


def damaged(text: str) -> list[str]:
    """Texts that an entry must not be believed in."""
    entry = json.loads(text)
    return [
        "",
        text[: len(text) // 2],
        "[]",
        json.dumps({**entry, "about": {}}),
        json.dumps({**entry, "events": []}),
        json.dumps({**entry, "traces": {}}),
        json.dumps({**entry, "traces": {"call": {**entry["traces"]["call"], "first": [[[0], 1, 2]]}}}),
        json.dumps({**entry, "traces": {"call": {**entry["traces"]["call"], "numbers": {}}}}),
    ]


def test_an_entry_that_cannot_be_read_is_traced_again(traced: list[int], tmp_path: Path) -> None:
    good = find(Ring())
    file = entry_in(tmp_path)
    text = file.read_text(encoding="utf-8")
    for number, bad in enumerate(damaged(text), 2):
        file.write_text(bad, encoding="utf-8")
        assert find(Ring()) == good
        assert len(traced) == number
        assert file.read_text(encoding="utf-8") == text


def test_models_at_hand_and_strategies_of_others_are_not_kept(traced: list[int], tmp_path: Path) -> None:
    foreign = type("Foreign", (Ulysses,), {"__slots__": (), "__module__": "elsewhere"})
    for _ in range(2):
        find(subject=replace(TINY, settings=None))
        find(foreign())
    assert len(traced) == 4
    assert list(tmp_path.rglob("*.json")) == []


def test_nothing_is_kept_where_that_is_off_or_the_disk_says_no(
    traced: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    for folder in ("", str(tmp_path / "file")):
        monkeypatch.setenv("PARTSONG_TRACES", folder)
        assert find() == find()
    assert len(traced) == 4


def test_many_may_write_and_read_one_entry(traced: list[int], tmp_path: Path) -> None:
    good = find(Ring())
    file = entry_in(tmp_path)
    entry = json.loads(file.read_text(encoding="utf-8"))

    def both(number: int) -> CallTrace | None:
        if number % 2:
            kept_traces._write(file, entry)
        return kept_traces._read(file, entry["about"])

    with ThreadPoolExecutor(8) as pool:
        assert all(trace == good for trace in pool.map(both, range(64)))
    assert [path for path in file.parent.iterdir() if path != file] == []


def test_what_older_versions_have_kept_goes(traced: list[int], tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / "old", (0, 0))
    find()
    assert not (tmp_path / "old").exists()
    assert (tmp_path / "new").exists()
