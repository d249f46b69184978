"""Pipelines of further families, image-to-image, inpainting and ControlNet give the serial picture on every rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests.parallel import image_pipeline_worker as worker
from tests.parallel.image_pipelines import IMAGE_PIPES


@pytest.fixture(scope="module")
def pipelines() -> dict[tuple[str, str], list[dict[str, Any]]]:
    return launch(worker.pipelines, 2)


@functools.cache
def residuals(nproc: int) -> dict[tuple[str, str], list[tuple[float, float]]]:
    return launch(worker.residuals, nproc, nproc)


@pytest.mark.parametrize("strategy", worker.STRATEGIES)
@pytest.mark.parametrize("name", IMAGE_PIPES)
def test_every_rank_returns_the_serial_picture(pipelines: dict[Any, Any], strategy: str, name: str) -> None:
    rows = pipelines[strategy, name]
    assert len(rows) == 2
    for row in rows:
        assert row["error"] <= 1e-10
        assert row["sent"] == row["predicted"] > 0


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("strategy", ["Ulysses", "DataParallel"])
@pytest.mark.parametrize("name", worker.RESIDUALS)
def test_control_residuals_are_cut_like_the_tokens_they_are_added_to(nproc: int, strategy: str, name: str) -> None:
    rows = residuals(nproc)[strategy, name]
    assert len(rows) == nproc
    for error, effect in rows:
        assert effect > 1e-6, "the residuals must matter"
        assert error <= 1e-10
