"""Predicts published latencies of machines that took no part in choosing what the planner's clock lacks.

What devices do beside their part of the work is one share of the time of one device. Each paper and machine in turn is
left out: the share is chosen by the rows of all others, and its own rows of few devices set two constants, as a
calibration would. All its other rows have then never been seen.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from partsong.errors import PartsongError
from partsong.evals.planner.published import DATA, Group, groups_of, quantile, read_points

__all__ = ["SHARES", "leave_out", "predicted", "run", "summarise_held_out"]

#: Shares that are tried.
SHARES = (0.0, 0.005, 0.01, 0.015, 0.02, 0.03)
#: Errors above this count no more: such a row has another cause, such as a host that is slower than its devices.
_MOST = 0.4


def run(file: Path = DATA, *, most: int = 2, shares: Sequence[float] = SHARES) -> list[dict[str, Any]]:
    """Predicts every row of more devices than are known, of groups in which such and others are.

    Args:
        file: rows as in `DATA`.
        most: devices of a row that sets the constants of its group.
        shares: those that are tried.

    Returns:
        One dict per row: ``machine group ranks method seconds predicted error share``.
    """
    groups = [group for group in groups_of(read_points(file)[0]) if len({p.ranks <= most for p in group.points}) == 2]
    return leave_out({share: [row for group in groups for row in predicted(group, share, most)] for share in shares})


def predicted(group: Group, share: float, most: int) -> list[dict[str, Any]]:
    """Predicts the rows of a group that do not set its constants.

    Args:
        group: the rows.
        share: of the time of one device that each of several spends beside its part.
        most: devices of a row that sets the constants.
    """
    constants, rows = group.fit(share, most), []
    for point in group.points:
        if point.ranks <= most:
            continue
        try:
            seconds = group.predict(point, *constants, share)
        except PartsongError:
            continue  # `published.run` says why
        about = {"machine": point.machine, "group": group.name, "ranks": point.ranks, "method": point.method}
        error = seconds / point.seconds - 1
        rows.append({**about, "seconds": point.seconds, "predicted": seconds, "error": error, "share": share})
    return rows


def leave_out(tables: Mapping[float, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Takes the rows of each machine from the table of the share that suits all other machines best.

    Args:
        tables: the rows as they are predicted with each share.
    """
    rows: list[dict[str, Any]] = []
    for machine in sorted({row["machine"] for table in tables.values() for row in table}):
        share = min(tables, key=lambda each: _loss(row for row in tables[each] if row["machine"] != machine))
        rows += [dict(row) for row in tables[share] if row["machine"] == machine]
    return rows


def _loss(rows: Iterable[Mapping[str, Any]]) -> float:
    """Adds up errors; a machine with many rows counts more than one with few, and less than as many machines."""
    by_machine: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_machine[row["machine"]].append(min(abs(math.log1p(row["error"])), _MOST))
    return sum(sum(errors) / math.sqrt(len(errors)) for errors in by_machine.values())


def summarise_held_out(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns how large errors beyond two devices are, their median with sign, and how many rows are too fast.

    Args:
        rows: of `run`.
    """
    errors = [row["error"] for row in rows if row["ranks"] > 2]
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(errors),
        "median": quantile(sizes, 0.5),
        "p90": quantile(sizes, 0.9),
        "bias": quantile(errors, 0.5),
        "too_fast": sum(error < 0 for error in errors),
        "shares": sorted({row["share"] for row in rows}),
    }
