"""What is predicted of a machine that is left out does not depend on its own rows."""

from __future__ import annotations

from typing import Any

import pytest

from partsong.evals.planner.held_out import leave_out, predicted, summarise_held_out
from partsong.evals.planner.published import DATA, groups_of, read_points

Tables = dict[float, list[dict[str, Any]]]


def tables(**errors: tuple[float, float]) -> Tables:
    """One row of each machine, with its error under either of two shares."""
    return {
        share: [{"machine": name, "error": pair[place], "ranks": 4, "share": share} for name, pair in errors.items()]
        for place, share in enumerate((0.0, 0.01))
    }


def test_the_others_choose() -> None:
    rows = leave_out(tables(one=(-0.1, 0.0), other=(-0.1, 0.0), odd=(0.0, 0.2)))
    assert {row["machine"]: row["share"] for row in rows} == {"one": 0.0, "other": 0.0, "odd": 0.01}


def test_a_machine_that_is_left_out_changes_nothing_for_itself() -> None:
    for own in ((0.0, 0.1), (-0.3, 0.0)):
        rows = leave_out(tables(one=(-0.1, 0.0), other=(-0.1, 0.0), odd=own))
        assert next(row["share"] for row in rows if row["machine"] == "odd") == 0.01


def test_one_far_row_does_not_choose() -> None:
    rows = leave_out(tables(one=(0.0, 0.05), other=(0.0, 0.05), slow_host=(-0.6, -0.55), left=(0.0, 0.0)))
    assert next(row["share"] for row in rows if row["machine"] == "left") == 0.0


def test_a_summary_says_the_sign() -> None:
    said = summarise_held_out(tables(a=(-0.1, 0.0), b=(-0.2, 0.0), c=(0.3, 0.0))[0.0])
    assert (said["rows"], said["median"], said["bias"], said["too_fast"]) == (3, 0.2, -0.1, 2)


@pytest.mark.full
def test_a_larger_share_takes_longer_beyond_what_is_known() -> None:
    points = [p for p in read_points(DATA)[0] if "CONTEXT_PARALLEL" in p.source and not p.compiled]
    (group,) = groups_of(points)
    none, some = (predicted(group, share, 2) for share in (0.0, 0.02))
    assert all(row["ranks"] > 2 for row in none) and len(none) == 5
    assert all(1.0 < b["predicted"] / a["predicted"] < 1.05 for a, b in zip(none, some, strict=True))
