"""The numbers a comparison reports, on images whose difference is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from partsong.jobs.compare import WARM_UP_STEPS, drift, gather, serial_run
from partsong.parallel import Mesh


def test_drift_is_the_median_psnr_and_the_largest_difference() -> None:
    serial = np.zeros((3, 4, 4, 3), np.float32)
    moved = serial + np.array([0.1, 0.01, 0.001], np.float32)[:, None, None, None]
    found = drift(moved, serial)
    assert found.psnr == pytest.approx(40.0, abs=1e-4)
    assert found.psnr_worst == pytest.approx(20.0, abs=1e-4)
    assert found.max_abs_diff == pytest.approx(0.1)


def test_equal_images_have_no_drift() -> None:
    images = np.full((2, 4, 4, 3), 0.5)
    assert drift(images, images.copy()).psnr == math.inf
    assert drift(images, images.copy()).max_abs_diff == 0.0


def test_other_number_of_images_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        drift(np.zeros((2, 4, 4, 3)), np.zeros((3, 4, 4, 3)))


def test_serial_run_warms_up_once_and_repeats() -> None:
    steps: list[int | None] = []

    def draw(target: Any, num_steps: int | None) -> np.ndarray:
        assert target == "pipe"
        steps.append(num_steps)
        return np.zeros((1, 2, 2, 3))

    with Mesh() as mesh:
        run = serial_run("pipe", mesh, draw, repeats=3)
        assert gather(mesh, [1.0, 2.0], "test") == [[1.0, 2.0]]
    assert steps == [WARM_UP_STEPS, None, None, None]
    assert run is not None
    assert run.bytes_sent == (0,)
    assert run.seconds >= 0
