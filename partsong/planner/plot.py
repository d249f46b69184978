"""Draws predicted time against the number of devices, and against drift."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError
from partsong.planner.hardware import Machine
from partsong.planner.recommend import advise
from partsong.planner.subject import Subject
from partsong.samplers.registry import strategies

__all__ = ["draw"]

#: At most this many strategies are drawn, those that are best on all devices.
_CURVES = 8


def draw(subject: Subject, machine: Machine, file: Path, *, max_drift: float, **asked: Any) -> None:
    """Draws two plots beside each other into a file.

    Args:
        subject: the model.
        machine: the largest machine to draw.
        file: ends in .png or .svg.
        max_drift: as for `recommend`; the second plot shows all drifts.
        **asked: as for `advise`.

    Raises:
        ArgumentError: matplotlib is not installed, or it does not know the file's ending.
    """
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as problem:
        raise ArgumentError("--plot needs matplotlib: pip install 'partsong[eval]'") from problem
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise ArgumentError(f"{file}: plots are written as .png, .svg or .pdf")
    numbers = [ranks for ranks in (1, 2, 4, 8, 16, 32, 64) if ranks < machine.ranks] + [machine.ranks]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    curves: dict[str, dict[int, float]] = {}
    for ranks in numbers:
        part = replace(machine, ranks=ranks, per_node=min(ranks, machine.per_node))
        for row in advise(subject, part, max_drift=max_drift, **asked).rows:
            name = _kind(row.strategies) if row.strategies else "one device"
            curves.setdefault(name, {}).setdefault(ranks, row.seconds)
    best = sorted(curves, key=lambda name: min(curves[name].values()))[:_CURVES]
    for name in best:
        left.plot(list(curves[name]), list(curves[name].values()), marker="o", label=name)
    left.set(xscale="log", yscale="log", xlabel="devices", ylabel="seconds (predicted)", title=subject.name)
    left.set_xticks(numbers, [str(number) for number in numbers])
    left.legend(fontsize="small")
    for row in advise(subject, machine, max_drift=1.0, **asked).rows:
        right.plot(row.drift, row.seconds, marker="o", color="tab:green" if row.kind == "exact" else "tab:orange")
        right.annotate(_kind(row.strategies) or "one device", (row.drift, row.seconds), fontsize="xx-small")
    title = f"{machine.ranks}x {machine.device.name}"
    right.set(xlabel="drift (root mean square of pixels)", ylabel="seconds (predicted)", title=title)
    figure.savefig(file, dpi=150)


def _kind(mix: Any) -> str:
    """Names a mix without degrees and without what is added to every mix."""
    names = {kind: name for name, kind in strategies().items()}
    return " ".join(names[type(strategy)] for strategy in mix if strategy.denoises)
