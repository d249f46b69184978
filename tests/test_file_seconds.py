"""The watch over the seconds of files: shares of a run, and shards that leave nothing out."""

from __future__ import annotations

import doctest

import pytest

from tests import file_seconds


def test_examples_hold() -> None:
    assert doctest.testmod(file_seconds).failed == 0


@pytest.mark.parametrize("count", [1, 3, 8])
def test_every_file_is_in_one_shard_and_the_shards_are_even(count: int) -> None:
    files = {f"tests/test_{n}.py": float(n % 17 + 1) for n in range(120)}
    places = file_seconds.shard_of(files, count)
    assert places.keys() == files.keys() and set(places.values()) == set(range(count))
    loads = [sum(files[file] for file, place in places.items() if place == shard) for shard in range(count)]
    assert max(loads) - min(loads) <= max(files.values())


def test_reasons_name_files_that_are_there() -> None:
    from tests.documents import ROOT

    assert all((ROOT / file).is_file() and reason for file, (_, reason) in file_seconds.REASONS.items())


def test_a_short_run_is_of_a_few_files_and_has_no_budget() -> None:
    assert not file_seconds.over_budget({"tests/test_one.py": 100.0})
