"""Traces that come with the package: one file for each published model, equal to fresh ones, and enough to plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from partsong import Ulysses
from partsong.planner import MODELS, Subject, advise, machine_named, shipped_traces, steps, subject_named
from partsong.planner.calls import Size
from partsong.planner.shipped_traces import FOLDER, shipped_for
from partsong.planner.trace_data import TraceTable
from tests.planner.shipped import RANKS, data_for
from tests.planner.shipped_files import file_of, skip_other_versions

#: Made anew in the default run, in one part of all ranks; the others in the full suite.
QUICK = ("flux-schnell", "sd3.5-medium")
#: Quick to trace, where a test needs one only.
ONE = "flux-schnell"


def made_anew(name: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    skip_other_versions(name)
    return json.loads(json.dumps(data_for(name, ranks)))


def own_size(subject: Subject) -> Size:
    return Size(height=subject.height, width=subject.width, frames=subject.frames, dtype=subject.dtype)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was traced, or sought among what is kept."""
    sought: list[object] = []

    def seek(*args: Any, **kwargs: Any) -> Any:
        sought.append(args)
        raise AssertionError("it is among the shipped ones")

    monkeypatch.setattr(steps, "find_trace", seek)
    monkeypatch.setattr(steps, "decoding_of", seek)
    return sought


def test_every_published_model_has_its_traces() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.json.xz" for name in MODELS}


@pytest.mark.parametrize("name", QUICK)
def test_some_of_the_traces_are_those_of_today(name: str) -> None:
    fresh, shipped = made_anew(name, (2,)), file_of(name)
    assert fresh["decoding"] == shipped["decoding"]
    assert fresh["refused"].items() <= shipped["refused"].items()
    mine, theirs = TraceTable(fresh), TraceTable(shipped)
    assert all(mine.trace(key) == theirs.trace(key) for key in fresh["traces"])
    assert len(fresh["traces"]) > 5


@pytest.mark.full
@pytest.mark.parametrize("name", list(MODELS))
def test_all_traces_are_those_of_today(name: str) -> None:
    assert made_anew(name, RANKS) == file_of(name)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("ranks", RANKS)
def test_a_plan_for_a_published_model_traces_nothing(name: str, ranks: int, untraced: list[object]) -> None:
    skip_other_versions(name)
    subject = replace(subject_named(name))  # a copy, of which nothing has been built
    advice = advise(subject, machine_named(f"{ranks}xh200", "nvlink"))
    assert advice.rows and not untraced
    assert "denoiser" not in vars(subject)


def test_a_shipped_trace_plans_like_one_that_was_just_made() -> None:
    machine = machine_named("2x4090", "pcie4")
    subject = subject_named(ONE)
    assert advise(subject, machine) == advise(replace(subject, published=None), machine)


def test_only_what_they_are_of_is_read_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_named(ONE)
    size = own_size(subject)
    monkeypatch.setattr(shipped_traces, "versions", lambda: file_of(ONE)["versions"])
    shipped = shipped_for(subject, size, fused=True)
    assert shipped is not None and shipped.trace([Ulysses(degree=2)], 2, 1) is not None
    assert shipped.trace([Ulysses(degree=2)], 2, 2) is None and shipped.trace([Ulysses(degree=3)], 3, 1) is None
    assert shipped_for(subject, size, fused=False) is None
    for other in ({"height": 512}, {"batch": 2}, {"dtype": torch.float32}):
        assert shipped_for(subject, replace(size, **other), fused=True) is None
    assert shipped_for(replace(subject, published=None), size, fused=True) is None
    with monkeypatch.context() as environment:
        environment.setenv("PARTSONG_ATTENTION", "naive")
        assert shipped_for(subject, size, fused=True) is None
    monkeypatch.setattr(shipped_traces, "versions", lambda: {"torch": "0", "diffusers": "0"})
    assert shipped_for(subject, size, fused=True) is None


def test_without_the_files_a_model_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped_traces, "FOLDER", tmp_path)
    subject = subject_named(ONE)
    assert shipped_for(subject, own_size(subject), fused=True) is None
