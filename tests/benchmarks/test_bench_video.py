"""The benchmark of video strategies: every contest has a row, and a queue of blocks idles as its formula says."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.video import contests
from benchmarks.video.contests import FEW_STEPS, STEPS, run
from partsong.parallel import launch


def queue_alone() -> list[dict[str, Any]]:
    """The rows of a run on a rank with no contest but that of the queue of blocks."""
    (queue,) = (contest for contest in contests.contests(2, 2) if contest.name == "DualParallel")
    contests.contests = lambda blocks, side: [queue]
    return contests._on_rank(2, 1, 2, 2)


@pytest.mark.full
def test_a_queue_of_blocks_idles_as_its_formula_says() -> None:
    (row,) = launch(queue_alone, 2)
    assert row["size"] == 29 and row["idle_predicted"] == 3 / (STEPS * 2 + 3)
    assert 0 < row["first_seconds"] <= row["seconds_median"] and len(row["seconds_all"]) == 1
    assert row["ratio_to_serial"] == row["seconds_serial"] / row["seconds_median"]


@pytest.mark.full
def test_rows_hold_what_the_table_shows() -> None:
    rows = {row["name"]: row for row in run(nproc=2, repeats=1, blocks=2, side=2)}
    assert {name: row["size"] for name, row in rows.items()} == {
        "ClipParallel": 29,
        "ClipParallel against itself": 29,
        "DualParallel": 29,
        "TimestepPipeline": 61,
        "TimestepPipeline, layers": 125,
    }
    for row in rows.values():
        assert 0 < row["first_seconds"] <= row["seconds_median"]
        assert row["ratio_to_serial"] == row["seconds_serial"] / row["seconds_median"]
        assert len(row["seconds_all"]) == 1
    assert rows["DualParallel"]["idle_predicted"] == 3 / (STEPS * 2 + 3)
    assert rows["ClipParallel"]["bytes_sent"] > 0
    assert len(rows["TimestepPipeline"]["seconds_all"][0]) == 4
    assert FEW_STEPS > 2  # each of the two ranks makes several
