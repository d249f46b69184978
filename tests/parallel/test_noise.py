"""Without a generator all ranks sample with rank 0's noise: that of the first latents and that of every step."""

from __future__ import annotations

from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests.parallel import noise_worker


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict[str, Any]]]:
    return launch(noise_worker.run, 2)


@pytest.mark.parametrize("name", noise_worker.CASES)
def test_every_rank_returns_the_picture_rank_0_draws_alone(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    first, second = results[name]
    assert first["effect"] > 1e-3, "the noise must change the picture"
    assert max(first["error"], second["error"]) <= 1e-10
    assert first["sum"] == second["sum"]


@pytest.mark.parametrize("name", noise_worker.CASES)
def test_counted_bytes_are_the_predicted_ones(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    for row in results[name]:
        assert row["sent"] == row["predicted"]
