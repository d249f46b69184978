"""The scripts that people copy: they go on after a kill, keep what is done, and refuse a folder of another run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2Transformer3DModel
from PIL import Image
from safetensors.torch import save_file

from partsong import zoo
from partsong.videos import FrameSample

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def command(name: str, *args: object) -> list[str]:
    return [sys.executable, str(RECIPES / f"{name}.py"), *map(str, args)]


def ran(name: str, *args: object) -> str:
    done = subprocess.run(command(name, *args), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("most", [2, 5, 12])
@pytest.mark.parametrize("frames", [1, 2, 7, 40, 100])
def test_kept_frames_are_evenly_spaced(most: int, frames: int) -> None:
    sample = FrameSample(most)
    for start in range(0, frames, 3):
        sample.append(range(start, min(start + 3, frames)))
    steps = set(np.diff(sample.numbers).tolist())
    assert sample.frames == sample.numbers and sample.numbers[0] == 0 and len(steps) <= 1
    assert min(most, frames) / 2 <= len(sample.frames) <= most
    assert sample.numbers[-1] + max(steps, default=1) >= frames


@pytest.mark.full
def test_a_long_video_goes_on_after_a_kill(tmp_path: Path) -> None:
    asked = ("--frames", 79, "--steps", 4, "--methods", "dual", "--guidance", 1)
    killed = subprocess.Popen(
        command("long_video", *asked, "--out", tmp_path / "killed"),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert killed.stderr is not None
    assert any("31 of 79 frames" in line for line in killed.stderr)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed" / "report.json").exists()
    for folder in ("killed", "whole"):
        ran("long_video", *asked, "--out", tmp_path / folder)
    first, second = (np.asarray(Image.open(tmp_path / folder / "dual.png")) for folder in ("killed", "whole"))
    assert np.array_equal(first, second) and (tmp_path / "killed" / "sheet.png").exists()
    assert "dual is done already" in ran("long_video", *asked, "--out", tmp_path / "whole")
    other = subprocess.run(
        command("long_video", *asked, "--out", tmp_path / "whole", "--seed", 1), capture_output=True, text=True
    )
    assert other.returncode == 1
    assert other.stderr.splitlines()[-1].endswith("holds videos with another seed; give another --out")


@pytest.mark.full
def test_a_large_picture_has_a_sheet_and_is_kept(tmp_path: Path) -> None:
    asked = ("--factor", 2, "--steps", 3, "--out", tmp_path)
    ran("highres_image", *asked)
    rows = json.loads((tmp_path / "report.json").read_text())["pictures"]
    assert rows["guided"]["size"] == rows["plain"]["size"] == [128, 128]
    assert rows["plain"]["border_jump_ratio"] > 0 and (tmp_path / "sheet.png").exists()
    said = ran("highres_image", *asked)
    assert "guided.png is there already" in said and "plain.png is there already" in said


@pytest.mark.full
def test_a_stream_that_ended_is_taken_up_again(tmp_path: Path) -> None:
    asked = ("--out", tmp_path / "s.mp4", "--journal", tmp_path / "journal", "--blocks")
    said = ran("stream_video", *asked, 3)
    assert "s.mp4: frames 23" in said and (tmp_path / "s-sheet.png").exists()
    assert "s.mp4: frames 23" in ran("stream_video", *asked, 3)


@pytest.mark.full
def test_a_causal_checkpoint_is_streamed(tmp_path: Path) -> None:
    model: Any = SkyReelsV2Transformer3DModel.from_pretrained(
        zoo.MODELS["motion-causal"].folder, subfolder="transformer"
    )
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    asked = ("--checkpoint", tmp_path / "weights.safetensors", "--blocks", 3, "--out", tmp_path / "s.mp4")
    assert "s.mp4: frames 17" in ran(
        "stream_video", *asked
    )  # blocks of three latents, two frames each but for the first
