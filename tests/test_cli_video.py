"""``partsong video``: what it writes, what it measures, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import pytest

from partsong.cli import main, parse
from partsong.cli.video import _zoo_model
from tests.tiny_models.motion import save_motion

KEYS = {
    "command",
    "strategy",
    "nproc",
    "seed",
    "seconds",
    "out",
    "ledger",
    "class",
    "height",
    "width",
    "size_note",
    "frames",
    "frames_per_second",
    "first_frame_seconds",
    "facts_read",
    "identity_kept",
    "border_jump_ratio",
    "peak_memory_mb",
    "bytes_sent",
}
CAPTION = "a red circle moves right"


def run(*args: object) -> int:
    """Exit code of a command run in this process."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The motion pipelines with one head, two layers and random weights."""
    return save_motion(tmp_path_factory.mktemp("motion"))


def sample(folder: Path, out: Path, *args: object) -> dict[str, Any]:
    json_path = out.with_suffix(".json")
    size = ("--height", 32, "--width", 32, "--steps", 2, "--guidance", 1)
    assert run("video", CAPTION, "--model", folder, "--out", out, "--json", json_path, *size, *args) == 0
    return json.loads(json_path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("plain", "dual-parallel:block_frames=4,context=2"),
        pytest.param("causal", "timestep-pipeline:window=2", marks=pytest.mark.full),
    ],
)
def test_a_long_video_is_the_same_on_two_ranks(
    folders: dict[str, Path], name: str, strategy: str, tmp_path: Path
) -> None:
    frames = (12 - 1) * 2 + 1
    ranks = ("--frames", frames, "--nproc", 2, "--strategy", strategy, "--compare", "--ledger", tmp_path / "l.jsonl")
    result = sample(folders[name], tmp_path / "v.mp4", *ranks)
    assert result.keys() >= KEYS | {"seconds_serial", "speedup", "psnr_to_serial", "max_abs_diff"}
    assert result["max_abs_diff"] == 0.0
    assert result["psnr_to_serial"] == 999.0
    assert result["frames"] == frames == len(imageio.mimread(tmp_path / "v.mp4"))
    assert len(result["bytes_sent"]) == len(result["peak_memory_mb"]) == 2
    assert min(result["bytes_sent"]) > 0
    assert 0 < result["first_frame_seconds"] < result["seconds"]
    assert result["facts_read"] is None  # no zoo model, so nobody can read it


def test_a_plain_video(folders: dict[str, Path], tmp_path: Path) -> None:
    result = sample(folders["plain"], tmp_path / "v.gif", "--frames", 9)
    assert (result["frames"], result["strategy"], result["class"]) == (9, "serial", "exact")
    assert len(imageio.mimread(tmp_path / "v.gif")) >= 1


@pytest.mark.parametrize(
    ("name", "ranks", "makes"),
    [
        ("plain", (), 11),
        pytest.param("plain", ("--nproc", 2, "--strategy", "clip-parallel"), 11, marks=pytest.mark.full),
        ("plain", ("--strategy", "dual-parallel:block_frames=3,context=2"), 11),
        ("causal", ("--strategy", "timestep-pipeline:window=2"), 15),
    ],
)
def test_any_number_of_frames_is_delivered(
    folders: dict[str, Path], name: str, ranks: tuple[Any, ...], makes: int, tmp_path: Path, capfd: Any
) -> None:
    """They are the first frames of the next longer video that the model can make."""
    result = sample(folders[name], tmp_path / "some", "--frames", 10, *ranks)
    assert (result["frames"], result["frames_cut"]) == (10, makes - 10)
    assert f"the model makes no 10 frames: {makes - 10} more were sampled and cut" in capfd.readouterr().out
    sample(folders[name], tmp_path / "all", "--frames", makes, *ranks)
    some, every = (sorted((tmp_path / place).iterdir()) for place in ("some", "all"))
    assert (len(some), len(every)) == (10, makes)
    assert [path.read_bytes() for path in some] == [path.read_bytes() for path in every[:10]]


def test_a_run_that_was_stopped_is_resumed(folders: dict[str, Path], tmp_path: Path) -> None:
    strategy = ("--frames", 23, "--strategy", "dual-parallel:block_frames=3,context=2")
    sample(folders["plain"], tmp_path / "whole", *strategy)
    sample(folders["plain"], tmp_path / "a", *strategy, "--journal", tmp_path / "j")
    (tmp_path / "j" / "block-000003.safetensors").unlink()  # as if it had been stopped in the last block
    assert run("video", "--resume", tmp_path / "j", "--out", tmp_path / "b", "--nproc", 2) == 0
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert len(names) == 23
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.full
def test_the_zoo_animates_a_caption_and_reads_it_back(tmp_path: Path) -> None:
    knobs = ("--frames", 47, "--nproc", 2, "--strategy", "dual-parallel:block_frames=8", "--compare", "--steps", 6)
    json_path = tmp_path / "r.json"
    assert run("video", "a big red circle moves right", *knobs, "--out", tmp_path / "v.mp4", "--json", json_path) == 0
    result = json.loads(json_path.read_text(encoding="utf-8"))
    assert result["model"] == "motion"
    assert result["frames"] == 47
    assert result["max_abs_diff"] == 0.0
    assert result["facts_read"] >= 0.75
    assert result["identity_kept"] >= 0.9
    assert result["border_jump_ratio"] > 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--out", "v.avi"], "videos are written as"),
        (["--fps", 0], "--fps 0"),
        (["--frames", 0], "--frames 0"),
        (["--strategy", "timestep-pipeline"], "sees the past alone"),
        (["--set", "num_frames=9"], "--frames"),
        (["--journal", "j"], "keep a journal"),
        (["--resume", "nowhere"], "no run can be read there"),
        (["--model", "motions"], "motion"),
    ],
)
def test_refusals(folders: dict[str, Path], args: list[Any], words: str, tmp_path: Path, capfd: Any) -> None:
    place = [] if "--out" in args else ["--out", tmp_path / "v.mp4"]
    assert run("video", CAPTION, "--model", folders["plain"], *place, *args) == 2
    assert words in capfd.readouterr().err


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ("CascadePipeline:depth=2", "motion-clean"),
        ("cascade-pipeline", "motion-clean"),
        ("TimestepPipeline", "motion-causal"),
        ("DualParallel", "motion"),
    ],
)
def test_the_zoo_model_suits_the_strategy_however_it_is_written(strategy: str, model: str) -> None:
    assert _zoo_model(parse(["video", CAPTION, "--strategy", strategy])) == model
