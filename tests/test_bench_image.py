"""The benchmark's rows are complete and its drift column can be trusted."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path

import pytest

from partsong.errors import ArgumentError
from partsong.evals.bench.image import LIMIT, run
from partsong.parallel.ranks.agreement import NUMBERS_PER_VALUE
from partsong.planner import Device, Link
from partsong.planner.calibration import Calibration
from partsong.planner.this_machine import hardware_name
from tests import covering

#: What is timed instead of the usual mixes, which run with ``--full``.
FEW = ("ulysses", "ring", "displaced-patch")
#: What rows and traces call these.
CALLED = dict(zip(FEW, ("Ulysses", "Ring", "DisplacedPatch") if covering.FULL else FEW, strict=True))


#: Which strategies the planner may choose where messages cost nothing.
EXACT = {"Ring", "Ulysses", "TensorParallel"}
#: A mix of which one part alone has ranks.
MIXED = "ring+cfg-parallel:degree=1"


def calibrated(folder: Path, bandwidth: float) -> None:
    """Files the measurements of a machine whose links carry so many bytes per second."""
    device = Device(name="t", flops=1e9, bandwidth=1e9, memory=1e9, dispatch=1e-6, host=True)
    link = Link(name="t", latency=0.0, bandwidth=bandwidth)
    known = Calibration(name="t", device=device, link=link, ranks=2, slots=2, alone=1.0, spread=1.1, raw={})
    known.write(folder / f"{hardware_name()}-2-ranks.json")


@functools.cache
def measured() -> tuple[list[dict], set[str]]:
    """The rows, and the names of the ranges in the trace of a step."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        traces, few = Path(folder) / "traces", () if covering.FULL else FEW
        patch.setenv("PARTSONG_CALIBRATIONS", folder)
        found = run(nproc=2, repeats=1, models=("wan-like",), tokens=(64,), profile=traces, strategies=few)
        trace = json.loads((Path(folder) / "traces" / "wan-like-64.json").read_text(encoding="utf-8"))
    names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
    return found, {name.removeprefix("partsong: ") for name in names if name.startswith("partsong: ")}


def rows() -> list[dict]:
    return measured()[0]


@pytest.mark.slow
def test_traces_name_cases_calls_attentions_and_messages() -> None:
    ranges = measured()[1]
    assert {"serial", *CALLED.values(), "diffusers ring"} <= ranges
    assert "UlyssesStage of layer 0" in ranges
    assert any(re.fullmatch(r"WanTransformer3DModel, step \d, branch 0", name) for name in ranges)
    assert any(name.startswith("Ulysses: tokens to heads on axis ulysses") for name in ranges)
    assert any(name.startswith("wait for Ulysses: tokens to heads") for name in ranges)


def test_every_case_has_a_row() -> None:
    cases = [row["case"] for row in rows()]
    assert all(row["seconds_median"] > 0 for row in rows())
    if not covering.FULL:
        assert cases == ["serial", LIMIT, *FEW, "diffusers Ulysses", "diffusers ring"]
        return
    by_wire = ["Ulysses(wire='int8')", "Ring(wire='int8')"]
    displaced = ["DisplacedPatch", "DisplacedPatch(wire='int8')", "DisplacedPatch(wire='1bit')"]
    ours = ["Ulysses", "Ring", *by_wire, *displaced, "TensorParallel", "ShardedWeights + Ulysses"]
    assert cases == ["serial", LIMIT, *ours, "diffusers Ulysses", "diffusers ring"]


def test_exact_cases_match_serial_and_displaced_does_not() -> None:
    *exact, displaced = CALLED.values()
    drift = {row["case"]: row["relative_drift"] for row in rows()}
    assert max(drift[case] for case in (*exact, "diffusers Ulysses", "diffusers ring")) < 5e-6
    assert 5e-6 < drift[displaced] < 0.1


def test_bytes_are_those_of_the_formula() -> None:
    row = next(row for row in rows() if row["case"] == CALLED["ring"])
    layers, width, tokens, gathered = 9, 768, 64, 16 * 4
    compared = 8 * NUMBERS_PER_VALUE  # by which ranks see that their latents are the same
    assert row["bytes_sent_per_step"] == tokens // 2 * (layers * 2 * width + gathered) * 4 + compared


@pytest.mark.full
@pytest.mark.parametrize(("bandwidth", "choice"), [(1e12, EXACT), (1e3, {"serial"})])
def test_auto_is_what_the_planner_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bandwidth: float, choice: set[str]
) -> None:
    """With links that cost nothing any exact split wins, and with links that carry nothing none does."""
    monkeypatch.setenv("PARTSONG_CALIBRATIONS", str(tmp_path))
    calibrated(tmp_path, bandwidth)
    given = {"nproc": 2, "repeats": 1, "models": ("wan-like",), "tokens": (64,), "peers": False}
    cases = [row["case"] for row in run(**given, strategies=("auto", MIXED))]
    assert cases[:2] == ["serial", LIMIT]
    assert cases[2].removeprefix("auto: ") in choice
    assert cases[3:] == [MIXED]


def test_auto_wants_a_machine_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTSONG_CALIBRATIONS", str(tmp_path))
    with pytest.raises(ArgumentError, match="partsong calibrate --nproc 2"):
        run(nproc=2, models=("wan-like",), tokens=(64,), strategies=("auto",))
    with pytest.raises(ArgumentError, match="unheard-of"):
        run(nproc=2, models=("wan-like",), tokens=(64,), strategies=("unheard-of",))
