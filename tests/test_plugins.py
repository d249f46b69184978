"""A package that adds a strategy, an architecture and a thinking method is installed, found and used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from partsong import zoo

CODE = '''
"""Adds one thing of each kind to partsong."""

from dataclasses import dataclass, replace

from partsong import Ring
from partsong.parallel import ADAPTERS, Strategy
from partsong.reasoning import Answer
from partsong.reasoning.strategies import single

ROW = replace(ADAPTERS["FluxTransformer2DModel"], model="TinyTransformer", family="Tiny")


@dataclass(frozen=True, kw_only=True, slots=True)
class NearRing(Ring):
    """Passes key/value blocks around as Ring does."""


async def think_twice(run, question: str, *, extract, num: int = 2, parameters=None) -> Answer:
    """Asks once, and is called by another name."""
    return await single(run, question, extract=extract, parameters=parameters)
'''
ENTRIES = """[partsong.strategies]
near-ring = tiny_song:NearRing
broken = tiny_song:Missing

[partsong.adapters]
tiny = tiny_song:ROW

[partsong.thinking]
taken = partsong.reasoning.strategies.single:single
think-twice = tiny_song:think_twice
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the tiny package installed."""
    target = tmp_path_factory.mktemp("site")
    info = target / "tiny_song-1.0.dist-info"
    info.mkdir()
    # What pip would unpack of a wheel.
    (target / "tiny_song.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-song\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), *filter(None, sys.path)])}


#: Runs one command line after another in a process, as if each had one of its own, and notes how each ended.
SEVERAL = """
import json, sys
from partsong.cli import main

if __name__ == "__main__":
    for command in json.loads(sys.argv[1]):
        try:
            main(command)
        except SystemExit as ended:
            for stream in (sys.stdout, sys.stderr):
                print("ENDED", ended.code, file=stream, flush=True)
"""


class Done(NamedTuple):
    """How a command ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def partsong(environment: dict[str, str], *commands: tuple[object, ...]) -> list[Done]:
    """Imports are what costs: commands that need not be alone share a process."""
    given = json.dumps([[str(arg) for arg in command] for command in commands])
    done = subprocess.run([sys.executable, "-c", SEVERAL, given], env=environment, capture_output=True, text=True)
    out, err = (re.split(r"^ENDED (\d+)\n", text, flags=re.MULTILINE) for text in (done.stdout, done.stderr))
    assert len(out) == 2 * len(commands) + 1, done.stderr
    return [Done(int(out[k + 1]), out[k], err[k]) for k in range(0, len(out) - 1, 2)]


@pytest.fixture(scope="module")
def done(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Done]]:
    """The folder of results, and how a list, an answer and a refusal ended."""
    folder = tmp_path_factory.mktemp("results")
    listed = ("list", "support", "--json", folder / "rows.json")
    asked = ("think", "sort : dog ant cat =", "--model", "lists-ar", "--extract", "text", "--max-tokens", 9)
    twice, wrong = ((*asked, "--strategy", f"think-twice:{knob}=3") for knob in ("num", "number"))
    return folder, partsong(installed, listed, twice, wrong)


@pytest.mark.slow
def test_strategies_and_adapters_are_listed(done: tuple[Path, list[Done]]) -> None:
    folder, (listed, *_) = done
    assert listed.returncode == 0, listed.stderr
    rows = {
        row["strategy"]: row
        for row in json.loads((folder / "rows.json").read_text())["rows"]
        if "Tiny" in row["architectures"]
    }
    assert rows["NearRing"]["class"] == rows["Ring"]["class"] == "exact"
    warnings = [line for line in listed.stderr.splitlines() if "left out" in line]
    assert len(warnings) == 1, "a broken plug-in is named once"
    assert "broken of tiny-song (partsong.strategies)" in warnings[0] and "Missing" in warnings[0]


@pytest.mark.full
@pytest.mark.skipif(not (zoo.MODELS["shapes"].folder / "model_index.json").is_file(), reason="no weights of shapes")
def test_a_strategy_samples_as_its_twin(installed: dict[str, str], tmp_path: Path) -> None:
    files = ("--json", tmp_path / "r.json", "--out", tmp_path / "x.png", "--steps", 1)
    command = ("image", "a red circle", "--nproc", 2, "--strategy", "near-ring", "--compare", *files)
    (image,) = partsong(installed, command)
    assert image.returncode == 0, image.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["class"] == "exact" and result["max_abs_diff"] < 1e-4 and min(result["bytes_sent"]) > 0


@pytest.mark.skipif(not (zoo.MODELS["lists-ar"].folder / "config.json").is_file(), reason="no weights of lists-ar")
def test_a_way_to_think_answers(done: tuple[Path, list[Done]]) -> None:
    _, (*_, answered, refused) = done
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.splitlines()[0] == "ant cat dog"
    assert "taken of tiny-song" not in answered.stderr.replace("taken of tiny-song (partsong.thinking) is left out", "")
    assert "the name single is taken" in answered.stderr
    assert refused.returncode == 2 and "its options are num" in refused.stderr
