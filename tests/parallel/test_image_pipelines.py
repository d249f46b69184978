"""Pipelines of further families, image-to-image, inpainting and ControlNet give the serial picture on every rank."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.covering import chosen
from tests.parallel import image_pipeline_worker as worker
from tests.parallel.image_pipeline_worker import Case
from tests.parallel.image_pipelines import IMAGE_PIPES


@pytest.fixture(scope="module")
def pipelines() -> dict[tuple[str, str], list[dict[str, Any]]]:
    return launch(worker.pipelines, 2, PIPELINES)


#: By default strategies take turns with every other two pipelines; tests/pipelines has cases of all of them.
PIPELINES = [
    (label, name)
    for turn, label in enumerate(worker.STRATEGIES)
    for place, name in enumerate(IMAGE_PIPES)
    if covering.FULL or ((turn + place) % len(worker.STRATEGIES) == 0 and place // len(worker.STRATEGIES) % 2 == 0)
]


PRODUCT = [
    case
    for case in itertools.product((2, 3), worker.RESIDUAL_STRATEGIES, worker.RESIDUALS)
    if covering.FULL or case[0] == 2
]
CASES = chosen(PRODUCT)


@functools.cache
def residuals(nproc: int) -> dict[Case, list[tuple[float, float]]]:
    return launch(worker.residuals, nproc, nproc, [case for case in CASES if case[0] == nproc])


@pytest.mark.parametrize(("strategy", "name"), PIPELINES)
def test_every_rank_returns_the_serial_picture(pipelines: dict[Any, Any], strategy: str, name: str) -> None:
    rows = pipelines[strategy, name]
    assert len(rows) == 2
    for row in rows:
        assert row["error"] <= 1e-10
        assert row["sent"] == row["predicted"] > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_control_residuals_are_cut_like_the_tokens_they_are_added_to(case: Case) -> None:
    rows = residuals(case[0])[case]
    assert len(rows) == case[0]
    for error, effect in rows:
        assert effect > 1e-6, "the residuals must matter"
        assert error <= 1e-10
