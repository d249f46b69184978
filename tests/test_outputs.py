"""Files that are written, images that are compared, and the bar."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from partsong import outputs
from partsong.errors import ArgumentError, ArgumentTypeError, OutputError
from partsong.progress import bar_settings, progress


def picture(height: int = 6, width: int = 10, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


@pytest.mark.parametrize("kind", ["uint8", "float", "tensor", "bfloat16", "uint8 tensor", "pil"])
def test_save_image_loses_nothing(kind, tmp_path) -> None:
    pixels = picture()
    image = {
        "uint8": pixels,
        "float": pixels / 255.0,
        "tensor": torch.from_numpy(pixels / 255.0).permute(2, 0, 1),
        "bfloat16": (torch.from_numpy(pixels).permute(2, 0, 1) > 127).bfloat16(),
        "uint8 tensor": torch.from_numpy(pixels).permute(2, 0, 1),
        "pil": Image.fromarray(pixels),
    }[kind]
    path = outputs.save_image(image, tmp_path / "new" / "folder" / "a.png")
    expected = (pixels > 127) * np.uint8(255) if kind == "bfloat16" else pixels
    assert np.array_equal(np.asarray(Image.open(path)), expected)
    assert os.listdir(path.parent) == ["a.png"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("shape", [(6, 10), (6, 10, 1), (6, 10, 4)])
def test_save_grey_and_alpha(shape, tmp_path) -> None:
    path = outputs.save_image(np.full(shape, 0.5), tmp_path / "a.png")
    assert np.asarray(Image.open(path)).shape == (shape if shape[-1] == 4 else shape[:2])


@pytest.mark.parametrize(("ending", "lost"), [("webp", 0), ("WEBP", 0), ("jpg", 40), ("jpeg", 40)])
def test_the_ending_says_how_an_image_is_written(ending: str, lost: int, tmp_path) -> None:
    pixels = (np.linspace(0, 1, 16 * 16 * 3).reshape(16, 16, 3) * 255).round().astype(np.uint8)
    path = outputs.save_image(pixels, tmp_path / f"a.{ending}")
    with Image.open(path) as image:
        assert image.format == {"w": "WEBP", "j": "JPEG"}[ending[0].lower()]
        assert np.abs(np.asarray(image.convert("RGB")).astype(int) - pixels).max() <= lost


def test_palette_images_keep_their_colours(tmp_path) -> None:
    image = Image.fromarray(np.zeros((4, 4, 3), np.uint8) + np.uint8(200)).convert("P")
    path = outputs.save_image(image, tmp_path / "a.png")
    assert np.array_equal(np.asarray(Image.open(path)), np.asarray(image.convert("RGB")))


def test_save_images(tmp_path) -> None:
    assert outputs.save_images([picture()], tmp_path / "a.png") == [tmp_path / "a.png"]
    paths = outputs.save_images([picture(), picture()], tmp_path / "b.png")
    assert [path.name for path in paths] == ["b-000.png", "b-001.png"]
    assert all(path.exists() for path in paths)


def test_images_that_cannot_be_saved(tmp_path) -> None:
    for bad in (np.full((4, 4, 3), 1.5), np.full((4, 4, 3), math.nan), np.zeros((4, 4, 2)), np.zeros((0, 4, 3))):
        with pytest.raises(ArgumentError):
            outputs.save_image(bad, tmp_path / "a.png")
    for bad in (np.zeros((4, 4, 3), np.int64), "a picture", None):
        with pytest.raises(ArgumentTypeError):
            outputs.save_image(bad, tmp_path / "a.png")
    with pytest.raises(ArgumentError, match="written as .png, .webp, .jpg, .jpeg, not a.bmp"):
        outputs.save_image(picture(), tmp_path / "a.bmp")
    with pytest.raises(ArgumentError, match="JPEG has no transparency"):
        outputs.save_image(np.full((4, 4, 4), 0.5), tmp_path / "a.jpg")
    assert os.listdir(tmp_path) == []


def test_write_json(tmp_path) -> None:
    path = tmp_path / "new" / "a.json"
    values = {"b": 1, "a": [np.float32(0.5), None, True], "psnr_to_serial": math.inf, "out": tmp_path, "n": np.int64(3)}
    plain = outputs.write_json(path, values)
    text = path.read_text()
    assert json.loads(text) == plain
    assert plain == {"b": 1, "a": [0.5, None, True], "psnr_to_serial": 999.0, "out": str(tmp_path), "n": 3}
    assert list(json.loads(text)) == sorted(values)
    outputs.write_json(path, dict(reversed(values.items())))
    assert path.read_text() == text
    assert outputs.write_json(None, {"x": (1, "é")}) == {"x": [1, "é"]}


@pytest.mark.parametrize(
    ("value", "kind", "where"),
    [
        ({"a": {"b": [1, math.nan]}}, ArgumentError, r"a\.b\[1\]"),
        ({"seconds": math.inf}, ArgumentError, "seconds"),
        ({"psnr": -math.inf}, ArgumentError, "psnr"),
        ({"a": {1: 2}}, ArgumentTypeError, "key"),
        ({"a": {1, 2}}, ArgumentTypeError, "set"),
        ({"a": np.zeros(2)}, ArgumentTypeError, "ndarray"),
    ],
)
def test_json_is_strict_and_leaves_the_old_file(value, kind, where, tmp_path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(kind, match=where):
        outputs.write_json(path, value)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_check_writable(tmp_path) -> None:
    assert outputs.check_writable(tmp_path / "x" / "y" / "a.png") == tmp_path / "x" / "y" / "a.png"
    assert os.listdir(tmp_path / "x" / "y") == []
    with pytest.raises(ArgumentError, match="folder"):
        outputs.check_writable(tmp_path / "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot write"):
        outputs.check_writable(tmp_path / "file" / "a.png")
    with pytest.raises(ArgumentError, match="cannot write"):
        outputs.check_writable("/proc/nowhere/a.png")


def test_comparisons() -> None:
    a = picture() / 255.0
    assert outputs.psnr(a, a) == math.inf
    assert outputs.max_abs_diff(a, a) == 0.0
    b = np.full((4, 4, 3), 0.25)
    assert outputs.psnr(b, b + 0.1) == pytest.approx(20.0)
    assert outputs.max_abs_diff(torch.tensor(b).bfloat16(), torch.tensor(b + 0.125).bfloat16()) == 0.125
    assert outputs.max_abs_diff(Image.fromarray(picture()), picture()) == 0.0
    assert outputs.max_abs_diff([Image.fromarray(picture())] * 2, np.stack([picture()] * 2)) == 0.0
    with pytest.raises(ArgumentError, match="one size"):
        outputs.psnr(a, b)
    with pytest.raises(ArgumentTypeError):
        outputs.psnr(a, "a picture")


def test_progress(capsys, monkeypatch) -> None:
    assert list(progress(3, "steps")) == [0, 1, 2]  # no terminal here
    assert capsys.readouterr().err == ""
    with progress(["a", "b"], "steps", enabled=True) as bar:
        assert list(bar) == ["a", "b"]
    assert "steps" in capsys.readouterr().err
    with progress(3, "steps", True) as bar:
        bar.update(2)
    assert "2/3" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    with progress(3, "steps", enabled=True) as bar:
        bar.update(1)
    assert capsys.readouterr().err == ""


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys, monkeypatch) -> None:
    monkeypatch.setattr("partsong.progress.EVERY", 0.0)
    assert list(progress(2, "steps")) == [0, 1]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" after")[0] for line in lines] == ["steps: 0 of 2", "steps: 1 of 2", "steps: 2 of 2"]
    assert list(progress(2, "steps", enabled=False)) == [0, 1] and capsys.readouterr().err == ""
    pipe = DiffusionPipeline()
    pipe.set_progress_bar_config(**bar_settings("steps"))
    assert list(pipe.progress_bar(range(2))) == [0, 1] and capsys.readouterr().err.startswith("steps: 0 of 2 after")


def test_a_symlink_stays_and_its_target_is_replaced(tmp_path) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "result.json"
    target.write_text("old")
    target.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(target)
    outputs.write_json(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"a": 1}
    assert target.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path / "real") == ["result.json"]


def test_a_pipe_is_written_into(tmp_path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    outputs.write_json(pipe, {"a": 1})
    assert json.loads(os.read(reader, 100)) == {"a": 1}
    os.close(reader)
    assert pipe.is_fifo()


def test_devices_stay_devices() -> None:
    outputs.write_json("/dev/null", {"a": 1})
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OutputError, match="No space left"):
        outputs.write_json("/dev/full", {"a": 1})
    assert Path("/dev/full").is_char_device()


def test_the_programs_own_output_is_added_to(tmp_path) -> None:
    script = "from partsong import outputs; print('first', flush=True); outputs.write_text('/dev/stdout', 'second')"
    with (tmp_path / "log").open("wb") as log:
        subprocess.run([sys.executable, "-c", script], stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "first\nsecond"
    piped = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert piped.stdout == b"first\nsecond"


def test_links_in_a_circle_are_refused(tmp_path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ArgumentError, match="cannot write"):
        outputs.write_json(tmp_path / "a", {})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, None),
        ({"height": None, "width": 128}, None),
        ({"height": 96, "width": 128}, None),
        ({"height": 100}, "128 x 100 pixels were asked for, and the model makes 128 x 96"),
        ({"height": 100, "width": 130}, "130 x 100 pixels were asked for, and the model makes 128 x 96"),
    ],
)
def test_another_size_than_asked_for_is_said(asked, said) -> None:
    assert outputs.size_note(asked, 96, 128) == said
