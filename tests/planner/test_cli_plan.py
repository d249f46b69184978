"""``partsong plan`` and what it refuses."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from partsong import CfgParallel, EncodeOnce, Ulysses, zoo
from partsong.cli import parse
from partsong.cli.auto import settle_auto
from partsong.jobs import planning, usual_strategy
from partsong.jobs.planning import paste, subject_for
from partsong.parallel.ranks.launch import launch
from partsong.planner import models
from partsong.planner.machines import machine_named
from partsong.planner.recommend import advise
from tests.parallel import loading_worker
from tests.test_cli import run

KEYS = {"strategy", "seconds", "seconds_low", "seconds_high", "bytes_sent", "memory_mb", "class", "reason"}


def test_a_plan_ends_with_what_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    sizes = ("--height", 512, "--width", 512)
    assert run("plan", "--model", "pixart-sigma", "--gpus", "2xa100", *sizes, "--json", out) == 0
    result, shown = json.loads(out.read_text(encoding="utf-8")), capsys.readouterr().out
    assert set(result["rows"][0]) >= KEYS
    assert result["strategy"] == result["rows"][0]["strategy"]
    assert all(refusal["reason"] for refusal in result["refused"])
    assert "not measured" in result["calibration"]
    assert "--strategy cfg-parallel:degree=2" in shown
    assert "load_pipeline(" in shown


def test_the_python_of_a_plan_runs() -> None:
    subject, name = subject_for("shapes")
    advice = advise(subject, machine_named("2xa100", "nvlink3"), steps=2, only=[[CfgParallel(), EncodeOnce()]])
    mixed = tuple(row for row in advice.rows if row.strategies)
    always = replace(advice, rows=mixed, fits_serial=False)  # a model so small is not worth two devices
    _, code = paste(name, always, subject, steps=2)
    assert launch(loading_worker.pasted, 2, code) == [(64, 64)]


@pytest.mark.parametrize("name", ["shapes-unet", "motion", "motion-clean"])
def test_models_of_the_zoo_are_planned_at_their_own_size(name: str) -> None:
    subject, _ = subject_for(name)
    own = zoo.MODELS[name].defaults
    assert (subject.height, subject.frames) == (own["height"], own.get("num_frames", 1))
    advice = advise(subject, machine_named("2xa100", "nvlink3"), only=[[CfgParallel()]])
    assert 0 < advice.serial.decoding < advice.serial.seconds < 5


def test_the_line_for_several_boxes_starts_with_torchrun() -> None:
    subject, name = subject_for("shapes")
    apart = machine_named("4xa100", "nvlink3", per_node=2, across="10gbit")
    advice = advise(subject, apart, steps=2, only=[[CfgParallel(), Ulysses(degree=2)]])
    mixed = tuple(row for row in advice.rows if row.strategies)
    line, _ = paste(name, replace(advice, rows=mixed, fits_serial=False), subject)
    words = shlex.split(line)
    assert words[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "2"] and "--nproc" not in words
    options = parse(words[words.index("partsong") + 1 :])
    assert options.model == name and list(options.strategy) == ["cfg-parallel", "ulysses:degree=2"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "sdxl"), "partsong calibrate"),
        (("--model", "nothing", "--gpus", "2xh100"), "the known ones are"),
        (("--model", "sdxl", "--gpus", "2xh100", "--nproc", 2), "--nproc is for this machine"),
        (("--model", "sdxl", "--link", "nvlink"), "goes with --gpus"),
        (("--model", "sdxl", "--gpus", "2xh100", "--max-drift", -1), "max-drift"),
    ],
)
def test_refusals(
    args: tuple[object, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PARTSONG_CALIBRATIONS", str(tmp_path))
    assert run("plan", *args) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("asked", [(), ("--strategy", "auto")])
def test_a_machine_that_was_not_measured_takes_an_exact_strategy(
    asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTSONG_CALIBRATIONS", str(tmp_path))
    options, sentence = settle_auto(parse(["image", "a red circle", "--nproc", "2", *asked]), batch=1)
    assert (options.strategy, options.nproc) == (("ulysses",), 2)
    assert sentence is not None and "partsong calibrate --nproc 2" in sentence


def test_auto_starts_no_more_ranks_than_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    on_two = advise(models.subject_named("sdxl"), machine_named("2xh100", "nvlink"))
    monkeypatch.setattr(usual_strategy, "any_calibration", lambda: True)
    monkeypatch.setattr(planning, "machine_here", lambda ranks: machine_named(f"{ranks}xh100", "nvlink"))
    monkeypatch.setattr(planning, "subject_for", lambda name: (models.subject_named("sdxl"), name))
    options, sentence = settle_auto(parse(["image", "a red circle", "--nproc", "8", "--strategy", "auto"]), batch=1)
    assert (options.strategy, options.nproc) == (tuple(on_two.choice.strategy.split()), 2)
    assert sentence is not None and "The other 6 devices would not make it faster" in sentence


def test_what_needs_no_choice_is_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    one = parse(["image", "a red circle"])
    assert settle_auto(one) == (one, None)
    assert run("image", "a red circle", "--nproc", 2, "--strategy", "auto", "--strategy", "ring") == 2
    assert "leave the others out" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert run("image", "a red circle") == 2
    assert "--strategy" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["flux-dev", "black-forest-labs/flux.1-dev"])
def test_support_of_a_published_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for asked in (name, "FluxTransformer2DModel"):
        assert run("list", "support", asked) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "Ulysses" in shown[0]


@pytest.mark.full
def test_without_a_model_every_published_one_has_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: models.MODELS[name] for name in ("sd-1.5", "pixart-sigma")}
    monkeypatch.setattr(models, "MODELS", few)
    assert run("plan", "--gpus", "2x4090", "--memory", "3", "--json", tmp_path / "plan.json") == 0
    result = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    one, other = result["rows"]
    assert (one["model"], one["fits"], other["model"], other["fits"]) == ("sd-1.5", True, "pixart-sigma", False)
    advice = advise(models.subject_named("sd-1.5"), machine_named("2x4090", "pcie4", memory=3e9))
    assert (one["strategy"], one["seconds"]) == (advice.choice.strategy, advice.choice.seconds)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 of 2 published models fit on 2x 4090, pcie4")
    assert lines[4].split()[:2] == ["pixart-sigma", "-"] and lines[4].endswith("does not fit")


def test_options_of_one_model_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--gpus", "2x4090", "--height", "512") == 2
    assert "--height: give --model, too" in capsys.readouterr().err
