"""Files of a job against those of its serial twin."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from partsong.outputs import save_image
from partsong.serving.twins import compare_files, difference_map
from partsong.videos import save_video

GREY = np.full((16, 24, 3), 100 / 255)


def changed(level: float) -> np.ndarray:
    """The grey picture with one place that is brighter by some levels of 255."""
    picture = GREY.copy()
    picture[4:8, 6:12] += level / 255
    return picture


def test_pictures_are_compared_in_levels(tmp_path: Path) -> None:
    one, other, same = (tmp_path / name for name in ("one.png", "other.png", "same.png"))
    for path, picture in ((one, GREY), (other, changed(51)), (same, GREY)):
        save_image(picture, path)
    largest, ratio = compare_files([(one, same), (one, other)])
    # 24 of 384 places differ by a fifth.
    assert largest == pytest.approx(0.2)
    assert ratio == pytest.approx(-10 * np.log10(0.2**2 * 24 / 384), abs=1e-6)
    assert compare_files([(one, same)]) == (0.0, 999.0)


@pytest.mark.parametrize("suffix", [".png", ".mp4"])
def test_a_map_is_white_where_most_differs(tmp_path: Path, suffix: str) -> None:
    one, other = tmp_path / f"one{suffix}", tmp_path / f"other{suffix}"
    if suffix == ".png":
        save_image(GREY, one)
        save_image(changed(102), other)
    else:  # the place is bright in one frame of three
        save_video([GREY] * 3, one)
        save_video([GREY, changed(102), GREY], other)
    drawn, largest = difference_map(one, other)
    with Image.open(io.BytesIO(drawn)) as shown:
        pixels = np.asarray(shown, dtype=float) / 255
    assert largest == pytest.approx(0.4, abs=1e-9 if suffix == ".png" else 0.1)
    assert pixels.shape == (16, 24)
    assert pixels[4:8, 6:12].mean() > 0.7
    assert pixels[:, 16:].max() < 0.2


def test_equal_videos_are_equal_in_their_files(tmp_path: Path) -> None:
    one, other = tmp_path / "one.mp4", tmp_path / "other.mp4"
    for path in (one, other):
        save_video([changed(level) for level in (0, 40, 80)], path)
    assert compare_files([(one, other)]) == (0.0, 999.0)
    assert difference_map(one, other)[1] == 0.0
