"""What is understood of raw seconds, and the file that keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong.parallel.ranks.launch import launch
from partsong.planner import Device, Machine
from partsong.planner.calibration import calibrate, find_calibration, probe_trace, read_calibration, understand
from partsong.planner.clock import replay
from partsong.planner.measuring import LINK_SIZES, SMALL
from tests.planner.clocks_worker import measured_with_a_fast_clock

TRUE = Device(
    name="t",
    flops=2e11,
    bandwidth=5e9,
    memory=1e9,
    units=0,
    matmul=1.0,
    attention=0.5,
    dispatch=5e-6,
    least=0.0,
    host=True,
)
#: Seconds of an operator with no layer around it.
BARE = 1e-6


def raw(ranks: int = 2, slow: float = 1.0) -> dict[str, Any]:
    """Seconds that a machine of known numbers would take; steps take `slow` times as long as their operators."""
    alone = Machine(device=TRUE, link=TRUE_LINK, ranks=1, per_node=1)
    steps = {tokens: slow * replay(probe_trace(tokens, "cpu"), alone).steady for tokens in (256, 1024)}
    small = probe_trace(SMALL, "cpu", small=True)
    messages = []
    for size in LINK_SIZES:
        for form, at_once, ways in (("all-to-all", ranks - 1, ranks), ("ring", 1, ranks), ("one way", 1, 1)):
            seconds = 1e-4 + at_once * ways * size / 1e9 + 2e-5 * (at_once - 1)
            messages.append({"form": form, "bytes": size, "seconds": seconds})
    return {
        "ranks": ranks,
        "device": "cpu",
        "threads": 1,
        "dispatch": 100 * BARE,
        "small": slow * replay(small, alone).steady,
        "matmul": {rows: BARE + 2.0 * rows * 1024**2 / TRUE.flops for rows in (64, 512, 4096)},
        "attention": {keys: BARE + 4.0 * 8 * keys**2 * 64 / (0.5 * TRUE.flops) for keys in (512, 2048)},
        "memory": {numbers: 12 * numbers / TRUE.bandwidth for numbers in (2**13, 2**24)},
        "steps": steps,
        "alone": {tokens: 0.9 * seconds for tokens, seconds in steps.items()},
        "messages": messages,
        "overlap": {"message": 1e-3, "products": 2e-3, "both": 2.25e-3},
    }


TRUE_LINK = understand.__globals__["Link"](name="none", latency=0.0, bandwidth=1e9)


@pytest.mark.parametrize("ranks", [2, 4])
def test_known_numbers_are_recovered(ranks: int) -> None:
    seen = understand(raw(ranks))
    assert seen.device.flops == pytest.approx(TRUE.flops, rel=0.01)
    assert seen.device.attention == pytest.approx(0.5, rel=0.01)
    assert seen.device.bandwidth == pytest.approx(TRUE.bandwidth, rel=0.01)
    assert seen.device.dispatch == pytest.approx(TRUE.dispatch, rel=0.01)
    assert seen.link.shared
    assert seen.link.bandwidth == pytest.approx(1e9, rel=0.05)
    assert seen.link.busy == pytest.approx(0.25)
    assert seen.alone == pytest.approx(0.9)
    assert seen.spread == pytest.approx(1.0, abs=1e-3)


def test_what_operators_do_not_explain_slows_the_device() -> None:
    slow = understand(raw(slow=1.5)).device
    assert slow.flops == pytest.approx(TRUE.flops / 1.5, rel=0.01)
    assert slow.dispatch == pytest.approx(TRUE.dispatch * 1.5, rel=0.01)


def test_ranks_beyond_the_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partsong.planner.calibration.usable_cores", lambda: 2)
    seen = understand(raw(2))
    assert seen.machine(4).device.flops == pytest.approx(seen.device.flops / 2)
    assert seen.machine(1).device.flops == pytest.approx(seen.device.flops / 0.9)
    # Of four ranks that shared two cores, one by itself was measured to take half the time, and no less.
    crowded = raw(4)
    crowded["alone"] = {tokens: seconds / 2 for tokens, seconds in crowded["steps"].items()}
    seen = understand(crowded)
    assert seen.machine(2).device.flops == pytest.approx(seen.device.flops * 2)
    assert seen.machine(1).device.flops == pytest.approx(seen.device.flops * 2)


def test_a_file_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTSONG_CALIBRATIONS", str(tmp_path))
    assert find_calibration(2) is None
    for ranks in (2, 4):
        seen = understand(raw(ranks))
        seen.write(tmp_path / f"{seen.name}.json")
    found = find_calibration(4)
    assert found is not None and found.ranks == 4
    assert read_calibration(tmp_path / f"{found.name}.json").device == found.device


def test_a_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"name": 1}', encoding="utf-8")
    with pytest.raises(ArgumentError, match="is no calibration"):
        read_calibration(file)


@pytest.mark.full
def test_this_machine_is_measured_within_a_minute() -> None:
    import time

    start = time.perf_counter()
    seen = calibrate(2)
    assert time.perf_counter() - start < 60
    assert seen.device.flops > 1e9
    assert 0 < seen.link.latency < 0.1
    assert seen.spread < 2


def test_ranks_repeat_equally_often_whatever_their_clocks_say() -> None:
    """Where messages are slow, one rank has enough of them before another: then both made different calls."""
    raw = launch(measured_with_a_fast_clock, 2)
    assert {row["form"] for row in raw["messages"]} == {"all-to-all", "ring", "one way", "pair"}
    assert raw["overlap"]["both"] > raw["overlap"]["message"] / 2
