"""A job tells which size it made, and says so where a client asked for another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partsong.outputs import save_image
from partsong.serving.files.made_sizes import note_size
from partsong.serving.jobs import Job
from partsong.videos import save_video

ROUNDED = "130 x 100 pixels were asked for, and the model makes 128 x 96"


@pytest.mark.parametrize(
    ("asked", "note", "said"),
    [
        ({"width": 128, "height": 96}, None, None),
        ({"width": None, "height": None}, None, None),
        ({"width": 130, "height": 100}, None, ROUNDED),
        ({"width": 130, "height": 100}, "started anew", f"started anew; {ROUNDED}"),
    ],
)
@pytest.mark.parametrize("kind", ["image", "video"])
def test_what_was_made_is_noted(kind: Any, asked: dict[str, Any], note: str | None, said: str, tmp_path: Path) -> None:
    job = Job(id="j", kind=kind, model="m", request=asked, note=note)
    pixels = np.zeros((96, 128, 3), np.uint8)
    path = save_image(pixels, tmp_path / "a.png") if kind == "image" else save_video([pixels], tmp_path / "a.mp4")
    note_size(job, path)
    assert (job.as_json()["made_size"], job.note) == ("128x96", said)


def test_the_padding_of_an_odd_side_is_not_the_models(tmp_path: Path) -> None:
    job = Job(id="j", kind="video", model="m", request={"width": 33, "height": 21})
    note_size(job, save_video([np.zeros((21, 33, 3), np.uint8)], tmp_path / "a.mp4"))
    assert job.note is None
