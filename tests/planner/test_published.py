"""Predictions against published latencies, within the bounds that the planner promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from partsong.errors import ArgumentError
from partsong.evals.planner.published import DATA, read_points, run, summarise


def of_group(tmp_path: Path, *words: str) -> Path:
    """A file with those rows whose source has all the words."""
    rows = json.loads(DATA.read_text(encoding="utf-8"))["points"]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"points": [row for row in rows if all(w in json.dumps(row) for w in words)]}))
    return file


@pytest.mark.full
def test_rows_of_one_source_are_predicted(tmp_path: Path) -> None:
    said = summarise(run(of_group(tmp_path, "CONTEXT_PARALLEL.md", '"compiled": false')))
    assert said["held_out"] == 5
    assert said["held_out_median"] <= 0.07
    assert said["pairs_ordered"] >= 0.85


@pytest.mark.full
def test_all_rows_are_predicted() -> None:
    said = summarise(run())
    assert said["held_out"] >= 20
    assert said["held_out_median"] <= 0.07
    assert said["held_out_p90"] <= 0.20
    assert said["pairs_ordered"] >= 0.85
    assert said["profiles_only_median"] <= 0.25


def test_rows_that_cannot_be_predicted_say_why() -> None:
    points, others = read_points(DATA)
    assert len(points) >= 80
    assert all(reason for _, reason in others)
    assert any("fbcache" in reason for _, reason in others)


def test_a_file_without_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(ArgumentError, match="needs a list 'points'"):
        run(file)
