"""Rows of texts go through the ranks of LayerPipeline one after another, and are those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests.parallel import rows_in_flight_worker as worker

RANKS = [2, *(pytest.param(nproc, marks=pytest.mark.full) for nproc in (3, 4))]
CALLED = (*worker.FAMILIES, "two parts", "whole", "lazy cache", "static cache")


@functools.cache
def results(nproc: int) -> list[dict[str, Any]]:
    return launch(worker.run, nproc, nproc)


@pytest.mark.parametrize("nproc", RANKS)
@pytest.mark.parametrize("name", [*CALLED, "changed between", "watched"])
def test_logits_are_those_of_one_process(nproc: int, name: str) -> None:
    assert all(rank[name]["error"] <= 1e-10 for rank in results(nproc))


@pytest.mark.parametrize("nproc", RANKS)
@pytest.mark.parametrize("name", CALLED)
def test_counted_bytes_are_the_predicted_ones(nproc: int, name: str) -> None:
    for rank in results(nproc):
        sent, predicted = rank[name]["bytes"]
        assert not isinstance(predicted, str), predicted
        assert sent == predicted > 0


@pytest.mark.parametrize("nproc", RANKS)
@pytest.mark.parametrize("name", worker.DECODED)
def test_texts_of_different_lengths_are_those_of_one_process(nproc: int, name: str) -> None:
    assert all(rank[f"decoded, {name}"] for rank in results(nproc))


@pytest.mark.parametrize("nproc", RANKS)
def test_generate_writes_the_same(nproc: int) -> None:
    assert all(rank["generated"] for rank in results(nproc))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((family, "; 4 parts of a call in flight") for family in worker.FAMILIES),
        ("two parts", "; 2 parts of a call in flight"),
        ("whole", "and the vocabulary"),
        ("changed between", "; all rows of a call at once (the model does more between its layers)"),
        ("watched", "; all rows of a call at once (hooks on layers see whole calls)"),
    ],
)
def test_explanation_says_how_many_parts_are_in_flight(name: str, said: str) -> None:
    assert all(rank[name]["said"].endswith(said) for rank in results(2))


def test_caches_that_cannot_be_cut_by_rows_leave_calls_whole() -> None:
    for rank in results(2):
        assert rank["lazy cache"]["with keys"].endswith("; 4 parts of a call in flight")
        said = "; all rows of a call at once (a cache with StaticLayer is not cut by rows)"
        assert rank["static cache"]["with keys"].endswith(said)


def test_a_stage_begins_the_next_row_before_the_other_is_done_with_the_first() -> None:
    """Each waits for the other: without rows in flight this would not end."""
    assert all(rank["in flight"] <= 1e-10 for rank in results(2))
