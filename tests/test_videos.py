"""Videos: frames come back, a killed or full one still plays, nothing wrong is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest

from partsong.cli import parse
from partsong.cli.suites.pictures import evaluate_videos
from partsong.cli.video import video as cli_video
from partsong.errors import ArgumentError, OutputError
from partsong.videos import VideoWriter, save_video


def grey(value: float, height: int = 32, width: int = 48) -> np.ndarray:
    return np.full((height, width, 3), value)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "frames"])
@pytest.mark.parametrize("size", [(32, 48), (33, 47)])
def test_frames_come_back(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    path = save_video([grey(value, *size) for value in (0.1, 0.5, 0.9)], tmp_path / "new" / name, fps=8)
    frames = [imageio.imread(p) for p in sorted(path.iterdir())] if path.is_dir() else imageio.mimread(path)
    even = tuple(n + n % 2 for n in size) if name == "a.mp4" else size
    assert [frame.shape[:2] for frame in frames] == [even] * 3
    assert [round(float(frame[..., :3].mean()) / 255, 1) for frame in frames] == [0.1, 0.5, 0.9]


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("here already")
    for frames, name, words in (
        ([], "a.mp4", "needs frames"),
        ([grey(0.1), grey(0.1, 8, 8)], "b.mp4", "one size"),
        ([grey(0.1)], "a.avi", "not a.avi"),
        ([grey(0.1)], "full", "holds files already"),
        ([grey(1.5)], "c.mp4", "pixels lie in"),
    ):
        with pytest.raises(ArgumentError, match=words):
            save_video(frames, tmp_path / name)
    with pytest.raises(ArgumentError, match="fps"):
        save_video([grey(0.1)], tmp_path / "a.mp4", fps=0)


def test_mp4_without_its_extra_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("partsong.videos.find_spec", lambda name: None)
    for make in (lambda: VideoWriter(tmp_path / "a.mp4"), lambda: cli_video(parse(["video", "a circle"]))):
        with pytest.raises(ArgumentError, match=r"pip install 'partsong\[video\]'"):
            make()
    with pytest.raises(ArgumentError, match=r"partsong\[video\]"):
        evaluate_videos(parse(["eval", "videos", "--out", str(tmp_path / "out")]))
    assert not list(tmp_path.iterdir())
    assert save_video([grey(0.1)], tmp_path / "a.gif").is_file()


WRITER = """
import sys, os, signal
import numpy as np
from partsong.videos import VideoWriter
video = VideoWriter(sys.argv[1], fps=8)
noise = np.random.default_rng(0).integers(0, 255, (400, 64, 64, 3), dtype=np.uint8)
for frame in noise:
    video.append([frame])
os.killpg(os.getpid(), signal.SIGKILL)  # the encoder with it
"""


def test_a_video_that_was_killed_plays(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    done = subprocess.run([sys.executable, "-c", WRITER, str(path)], start_new_session=True, check=False)
    assert done.returncode == -signal.SIGKILL
    frames = imageio.mimread(path, memtest=False)
    assert 100 < len(frames) <= 400  # the encoder looks ahead; whole seconds are on disk


def test_a_full_disk_is_reported_and_what_was_written_is_kept(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    link = tmp_path / "a.mp4"
    link.symlink_to("/dev/full")
    noise = np.random.default_rng(0).random((400, 64, 64, 3))
    with pytest.raises(OutputError, match=r"cannot be written after frame \d+: .*is the disk full"):
        save_video(noise, link)
