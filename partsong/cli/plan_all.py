"""Runs ``partsong plan`` without a model: what each published model would be run with on some devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from partsong.cli.planning_options import Planning
from partsong.cli.table import table
from partsong.cores import usable_cores
from partsong.errors import ArgumentError
from partsong.progress import progress

__all__ = ["overview", "overview_summary"]

#: Options that belong to one model.
_OF_ONE = ("height", "width", "frames", "steps", "prompt", "plot")


def overview(options: Planning, machine: Any, source: str) -> dict[str, Any]:
    """Plans every published model at its own size, and returns a row for each.

    Raises:
        ArgumentError: an option was given that belongs to one model.
    """
    from partsong.planner.models import MODELS

    given = [f"--{name}" for name in _OF_ONE if getattr(options, name) is not None]
    if given:
        raise ArgumentError(f"{', '.join(given)}: give --model, too; without it all published models are planned")
    start = time.perf_counter()
    rows = [_row(name, options, machine) for name in progress(list(MODELS), "models")]
    return {
        "command": "plan",
        "model": None,
        "devices": f"{machine.ranks}x {machine.device.name}, {machine.link.name}",
        "calibration": source,
        "nproc": machine.ranks,
        "seconds": time.perf_counter() - start,
        "rows": rows,
    }


def _row(name: str, options: Planning, machine: Any) -> dict[str, Any]:
    from partsong.planner.models import subject_named
    from partsong.planner.recommend import advise_number

    subject = subject_named(name)
    row: dict[str, Any] = {"model": name, "steps": subject.steps, "fits": True, "reason": ""}
    try:
        advice = advise_number(
            subject, machine, batch=options.batch, max_drift=options.max_drift, processes=usable_cores()
        )  # fmt: skip
    except ArgumentError as error:
        return row | {"fits": False, "reason": str(error)}
    best = advice.choice
    return row | {
        "strategy": best.strategy,
        "idle": advice.idle,
        "seconds": best.seconds,
        "serial_seconds": advice.serial.seconds,
        "serial_fits": advice.fits_serial,
        "memory_mb": best.memory / 1e6,
        "bytes_sent": best.bytes_sent,
    }


def overview_summary(result: dict[str, Any]) -> str:
    """Returns a line for each model: its seconds, its memory and what to run it with."""
    lines: list[Sequence[str]] = [("model", "seconds", "one device", "GB", "run with")]
    for row in result["rows"]:
        if not row["fits"]:
            lines.append((row["model"], "-", "-", "-", "does not fit"))
            continue
        mix = row["strategy"] + (f" ({row['idle']} devices idle)" if row["idle"] else "")
        alone = f"{row['serial_seconds']:.3g}" if row["serial_fits"] else "does not fit"
        lines.append(
            (row["model"], f"{row['seconds']:.3g}", alone, f"{row['memory_mb'] / 1e3:.1f}", mix)
        )  # fmt: skip
    shown = table([{str(place): text for place, text in enumerate(line)} for line in lines])
    fitting = sum(row["fits"] for row in result["rows"])
    return "\n\n".join(
        (
            f"{fitting} of {len(result['rows'])} published models fit on {result['devices']}, at their own size and "
            "steps.",
            shown,
            f"From {result['calibration']}. partsong plan --model NAME says more of one, and prints lines to paste.",
        )
    )
