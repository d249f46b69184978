"""The lines for public models in recipes/README.md: they say what a plan predicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from partsong.planner import advise, machine_named, subject_named

PAGE = (Path(__file__).parents[2] / "recipes" / "README.md").read_text(encoding="utf-8")
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
