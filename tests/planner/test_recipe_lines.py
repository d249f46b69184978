"""The lines for public models in recipes/README.md: they say what a plan predicts."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro

from partsong import ParallelVae, StructureGuidance, parse_strategy
from partsong.parallel import Strategy
from partsong.planner import advise, machine_named, subject_named
from partsong.planner.estimate import estimate
from partsong.planner.memory import fits
from partsong.planner.steps import Tracer

RECIPES = Path(__file__).parents[2] / "recipes"
PAGE = (RECIPES / "README.md").read_text(encoding="utf-8")
LINE = re.compile(
    r"^\| `partsong (?P<kind>image|video) .*? --model (?P<hub>\S+) --nproc (?P<nproc>\d) (?P<mix>.*)` \| "
    r"(?P<devices>\S+) \| (?P<seconds>[\d.]+), (?P<faster>[\d.]+)x \| (?P<memory>\d+) GB \| (?P<sent>[\d.]+ [MG]B) \|$",
    re.MULTILINE,
)
#: Names on the hub -> names of the planner.
NAMES = {
    "stabilityai/stable-diffusion-xl-base-1.0": "sdxl",
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": "pixart-sigma",
    "Tongyi-MAI/Z-Image-Turbo": "z-image-turbo",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan-1.3b",
}
LINES = list(LINE.finditer(PAGE))


def test_every_line_is_read() -> None:
    assert len(LINES) == PAGE.count("| `partsong ") and {line["hub"] for line in LINES} == set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=f"{NAMES[line['hub']]}-{line['devices']}", marks=pytest.mark.full if number else [])
        for number, line in enumerate(LINES)
    ],
)
def test_a_line_is_what_a_plan_predicts(line: re.Match[str]) -> None:
    advice = advise(subject_named(NAMES[line["hub"]]), machine_named(line["devices"], "pcie4"))
    asked = [name.partition(":")[0] for name in line["mix"].replace("--strategy ", "").split()]
    row = advice.choice
    chosen = [name.partition(":")[0] for name in row.strategy.split()]
    assert chosen == [*asked, "parallel-vae", "encode-once"] and line["devices"].startswith(f"{line['nproc']}x")
    assert row.seconds == pytest.approx(float(line["seconds"]), rel=0.03)
    assert advice.serial.seconds / row.seconds == pytest.approx(float(line["faster"]), abs=0.06)
    assert row.memory / 1e9 == pytest.approx(float(line["memory"]), abs=0.6)
    number, unit = line["sent"].split()
    assert row.bytes_sent == pytest.approx(float(number) * {"MB": 1e6, "GB": 1e9}[unit], rel=0.08)


#: The lines of recipes with a loop of their own: what they say after their file's name, and what is predicted.
LOOP = re.compile(
    r"^\| `(?P<recipe>\w+)\.py --model (?P<hub>\S+) (?P<flags>.*?)` \| (?P<devices>\S+) \| "
    r"(?P<seconds>[\d.]+), (?P<faster>[\d.]+)x \| (?P<memory>\d+) GB \| (?P<sent>[\d.]+ [MG]B) \|$",
    re.MULTILINE,
)
LOOPS = list(LOOP.finditer(PAGE))


def recipe(name: str) -> Any:
    """Imports a recipe, which is a script."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


def mix_of(line: re.Match[str]) -> tuple[list[Strategy], Any]:
    """Returns the strategies that a recipe uses with a line's options, and these options."""
    module = recipe(line["recipe"])
    config = tyro.cli(module.Config, args=["--model", line["hub"], *line["flags"].split()])
    if line["recipe"] == "highres_image":
        return [StructureGuidance(overlap=config.overlap), ParallelVae()], config
    if line["recipe"] == "stream_video":
        return module._strategies(config), config
    return [module.strategy_of(config, "dual"), *map(parse_strategy, config.beside)], config


def test_every_line_of_a_loop_is_read() -> None:
    names = ("highres_image", "long_video", "stream_video")
    assert len(LOOPS) == sum(PAGE.count(f"| `{name}.py --model") for name in names)
    assert {line["recipe"] for line in LOOPS} == set(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=f"{line['recipe']}-{line['devices']}-{number}", marks=pytest.mark.full if number else [])
        for number, line in enumerate(LOOPS)
    ],
)
def test_a_line_of_a_loop_is_what_is_predicted(line: re.Match[str]) -> None:
    subject, (mix, config) = subject_named(NAMES[line["hub"]]), mix_of(line)
    if config.guidance == 1:
        subject = replace(subject, branches=1)
    if line["recipe"] == "highres_image":
        sides = (config.factor * subject.height, config.factor * subject.width, None)
    else:
        sides = (config.height, config.width, 801)
    tracer, machine = Tracer(subject, subject.sized(*sides, 1)), machine_named(line["devices"], "pcie4")
    row = estimate(tracer, mix, machine, config.steps)
    alone = estimate(tracer, mix[:1], replace(machine, ranks=1, per_node=1), config.steps)
    assert row.seconds == pytest.approx(float(line["seconds"]), rel=0.03)
    assert alone.seconds / row.seconds == pytest.approx(float(line["faster"]), abs=0.06)
    assert row.memory / 1e9 == pytest.approx(float(line["memory"]), abs=0.6) and fits(row.memory, machine.device)
    number, unit = line["sent"].split()
    assert row.bytes_sent == pytest.approx(float(number) * {"MB": 1e6, "GB": 1e9}[unit], rel=0.03)
