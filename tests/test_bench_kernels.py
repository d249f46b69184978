"""The kernels' benchmark has a row for every case, measured or skipped with a reason."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from partsong.errors import ArgumentError, UnsupportedError
from partsong.evals.bench import tune_kernels
from partsong.evals.bench.kernels import run
from partsong.evals.bench.tune_kernels import tune
from partsong.kernels import Causal, Segment, tuned
from partsong.kernels.backends import triton_attention
from partsong.kernels.call import Call


@functools.cache
def rows() -> list[dict]:
    return run(repeats=1, tokens=(96,), device="cpu")


@pytest.mark.full
def test_every_row_is_measured_or_says_why_not() -> None:
    for row in rows():
        measured = row["seconds_median"] is not None
        assert measured != bool(row.get("skipped")), row
        assert not measured or row["seconds_median"] > 0


def test_groups_are_complete() -> None:
    names = [row["name"] for row in rows()]
    assert len(names) == len(set(names))
    for width in (64, 128):
        for kind in ("full", "causal"):
            assert f"attention D{width} {kind} torch SDPA" in names
            assert f"attention D{width} {kind} cpu_flash" in names
            assert f"attention D{width} {kind} cudnn" in names
    assert {"segments cpu_flash in 8", "token head token_stats", "overhead attention"} <= set(names)


def test_speed_is_work_over_time() -> None:
    row = next(row for row in rows() if row["name"] == "attention D64 full cpu_flash")
    assert row["tflops"] * row["seconds_median"] == pytest.approx(4 * 8 * 96 * 96 * 64 / 1e12)


def test_tuning_needs_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(UnsupportedError, match="needs a GPU.*(no CUDA device|not installed|needs triton 3.6 or newer)"):
        tune(tmp_path / "tuned.json")


@pytest.mark.parametrize("able", [True, False])
def test_tuning_tries_the_copy_engine_where_it_can_read(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(1, 1, 64, 64, dtype=torch.float16)
    call = Call(x, (Segment(x, x, position=0),), None, None, 0.125)
    monkeypatch.setattr(triton_attention, "fits_copy_engine", lambda segments: able)

    def timed(cases, *_):
        return [{"name": name, "seconds_median": -int(name)} for name, _ in cases]  # the last candidate wins

    monkeypatch.setattr(tune_kernels, "timed", timed)
    best = tune_kernels._best_config(call)
    assert best.tma == able
    assert triton_attention.Config(**asdict(best)) == best
    without = {name: value for name, value in asdict(best).items() if name != "tma"}
    assert not triton_attention.Config(**without).tma, "tables written before there was a choice are still read"


def test_a_tuned_file_is_looked_up_by_gpu_and_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(2, 8, 1000, 64, dtype=torch.bfloat16)
    call = Call(x, (Segment(x, x, position=0),), Causal(), None, 0.125)
    assert tuned.shape_class(call) == "bfloat16 d64 causal q1024 k1024"
    assert tuned.tuned("backends", call) is None, "nothing is tuned for a CPU"
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"A GPU": {"backends": {"bfloat16 d64 causal q1024 k1024": ["triton", "cudnn"]}}}))
    assert tuned._tables(str(path))["A GPU"]["backends"][tuned.shape_class(call)] == ["triton", "cudnn"]
    path.write_text("nonsense")
    tuned._tables.cache_clear()
    with pytest.raises(ArgumentError, match="PARTSONG_TUNED"):
        tuned._tables(str(path))
