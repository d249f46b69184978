"""A pipeline that changes its transformer in mid-generation gives the serial film, and loses no byte."""

from __future__ import annotations

from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import two_denoisers_worker as worker

Results = dict[str, list[dict[str, Any]]]
#: By default one strategy that cuts tokens, and one that cuts the batch.
NAMES = tuple(worker.STRATEGIES)[:: 1 if covering.FULL else 2]
EXACT = (*NAMES, *worker.BOUNDARIES)


@pytest.fixture(scope="module")
def results() -> Results:
    return launch(worker.run, 2, NAMES)


@pytest.mark.full
def test_the_boundary_cases_are_what_they_are_called(results: Results) -> None:
    called = {name: results[name][0]["calls"] for name in worker.BOUNDARIES}
    assert min(called["both"]) > 0
    assert called["first only"] == [2 * worker.STEPS, 0]
    assert called["second only"] == [0, 2 * worker.STEPS]
    assert called["last step only"] == [2 * worker.STEPS - 2, 2]


@pytest.mark.parametrize("name", EXACT)
def test_every_rank_returns_the_serial_film(results: Results, name: str) -> None:
    assert len(results[name]) == 2
    for row in results[name]:
        assert row["error"] <= 1e-10
        assert row["finite"]


@pytest.mark.parametrize("name", [*EXACT, *worker.STALE])
def test_counted_bytes_are_the_predicted_ones(results: Results, name: str) -> None:
    for row in results[name]:
        assert row["sent"] == row["predicted"] > 0


@pytest.mark.parametrize("name", EXACT)
def test_undo_leaves_no_trace(results: Results, name: str) -> None:
    assert all(row["restored"] for row in results[name])


@pytest.mark.parametrize("name", worker.STALE)
def test_the_second_transformer_begins_with_fresh_keys(results: Results, name: str) -> None:
    first, second = results[name]
    assert 1e-10 < first["error"] < 1.0
    assert first["error"] == second["error"]
