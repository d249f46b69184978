"""Compares predictions with published latencies, of which rows with one and two devices set two constants."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError, PartsongError
from partsong.parallel.strategy import Strategy
from partsong.planner.calls import Size
from partsong.planner.clock import GenerationTime, clock_generation
from partsong.planner.devices import DEVICES, LINKS, REPEATED
from partsong.planner.hardware import Machine
from partsong.planner.models import subject_named
from partsong.planner.steps import Tracer
from partsong.planner.subject import Subject
from partsong.samplers.registry import (
    CfgParallel,
    DisplacedPatch,
    PatchPipeline,
    Ring,
    SyncPatch,
    TensorParallel,
    Ulysses,
)

__all__ = ["Group", "Point", "groups_of", "quantile", "read_points", "run", "summarise"]

#: Rows that come with the package, each with its source.
DATA = Path(__file__).with_name("published.json")
#: What the sources call models, devices and links.
_MODELS = {
    "FLUX.1-dev": "flux-dev",
    "FLUX.1-schnell": "flux-schnell",
    "HunyuanVideo": "hunyuan-video",
    "Sana-1600M-4K": "sana-1.6b",
    "SDXL": "sdxl",
    "Qwen-Image": "qwen-image",
    "Wan2.1-14B": "wan-14b",
    "Wan2.1-T2V-14B": "wan-14b",
    "Wan2.2-T2V-A14B": "wan-14b",
    "Wan2.1-1.3B": "wan-1.3b",
    "CogVideoX-5b": "cogvideox-5b",
    "CogVideoX-5B": "cogvideox-5b",
    "Z-Image-Turbo": "z-image-turbo",
    "Z-Image": "z-image-turbo",
    "FLUX.2-dev": "flux2-dev",
    "SD3.5-large": "sd3.5-large",
    "SD3-medium": "sd3.5-medium",
    "LTX-Video": "ltx-video",
    "PixArt-Sigma": "pixart-sigma",
    "PixArt-alpha": "pixart-sigma",
}
_DEVICES = {"H100": "h100", "H200": "h200", "H20": "h20", "A100": "a100", "L40": "l40", "L20": "l20"}
_DEVICES |= {"4090": "4090", "5090": "5090", "3090": "3090"}
_LINKS = {"NVLink": "nvlink", "PCIe4": "pcie4", "PCIe5": "pcie5", "PCIe": "pcie4"}

#: How the sources name ways to share the work.
_METHODS: Mapping[str, Callable[[int | None], Strategy]] = {
    "ulysses": lambda degree: Ulysses(degree=degree, waves=1),
    "sp": lambda degree: Ulysses(degree=degree, waves=1),
    "cp": lambda degree: Ulysses(degree=degree, waves=1),
    "ring": lambda degree: Ring(degree=degree),
    "cfg": lambda degree: CfgParallel(degree=degree),
    "tp": lambda degree: TensorParallel(degree=degree),
    "distrifusion": lambda degree: DisplacedPatch(degree=degree),
    "pipefusion": lambda degree: PatchPipeline(degree=degree),
    "patch sync": lambda degree: SyncPatch(degree=degree),
    "residual 1-bit": lambda degree: Ring(degree=degree, wire="1bit"),
    "residual 2-bit": lambda degree: Ring(degree=degree, wire="2bit"),
}
#: Constants are looked for around 1; logarithms of errors and of constants weigh by these.
_ERROR, _COMPUTE, _BESIDE = 0.03, 1.0, 0.7


@dataclass(frozen=True, slots=True)
class Point:
    """Describes one published latency.

    Attributes:
        group: what rows that may be compared have in common.
        ranks: devices.
        method: as the source names it.
        seconds: of a generation.
        size: of a picture or video.
        steps: of a generation.
        model: its name in the planner.
        device: its name in the planner.
        link: its name in the planner.
        compiled: whether blocks were compiled.
        source: where it was published.
    """

    group: str
    ranks: int
    method: str
    seconds: float
    size: Size
    steps: int
    model: str
    device: str
    link: str
    compiled: bool
    source: str

    @property
    def machine(self) -> str:
        """Names the paper or project and the machine, which have most of what is not known in common."""
        return ", ".join((re.split(r"[:#(]", self.source)[0].strip(), self.device, self.link))

    @property
    def mix(self) -> tuple[Strategy, ...]:
        """Returns the strategies.

        Raises:
            ArgumentError: a method that no strategy is, such as a cache.
        """
        method = re.sub(r"\s*\(.*?\)", "", self.method).strip()
        if method == "serial":
            return ()
        return tuple(self._strategy(part.strip()) for part in method.split(",") if part.strip() != "async")

    def _strategy(self, text: str) -> Strategy:
        name, _, degree = text.partition("=")
        digits, _, how = degree.partition(" ")
        if name not in _METHODS or (degree and not digits.isdigit()):
            raise ArgumentError(f"{text!r} is none of the methods that are predicted: {', '.join(_METHODS)}")
        ranks = int(digits) if digits else self.ranks
        if how == "all-gather":
            return SyncPatch(degree=ranks)
        if how == "fp8 all-to-all" or (not degree and how):
            return Ulysses(degree=ranks, wire="fp8")
        return _METHODS[name](ranks)


def read_points(file: Path) -> tuple[list[Point], list[tuple[dict[str, Any], str]]]:
    """Reads the rows that can be predicted, and the others with the reason.

    Raises:
        ArgumentError: the file cannot be read.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["points"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ArgumentError(f"{file} holds no published latencies ({problem}); it needs a list 'points'") from problem
    points, others = [], []
    for row in rows:
        try:
            point = _point(row)
            point.mix  # noqa: B018 - a method that is no strategy is refused here
        except (ArgumentError, KeyError, ValueError, TypeError, AttributeError) as problem:
            others.append((row, str(problem)))
        else:
            points.append(point)
    return points, others


def _point(row: Mapping[str, Any]) -> Point:
    model = row["model"] if row["model"] in _MODELS else None
    if model is None:
        raise ArgumentError(f"the model {row['model']!r} is not known to the planner")
    device = next((name for text, name in _DEVICES.items() if re.match(rf"(RTX ?)?{text}\b", row["gpu"])), None)
    link = next((name for text, name in _LINKS.items() if row["link"].startswith(text)), None)
    if device is None or link is None:
        raise ArgumentError(f"the device {row['gpu']!r} with the link {row['link']!r} is not known to the planner")
    subject = subject_named(_MODELS[model])
    first, second = (int(side) for side in row["resolution"].split("x"))
    # Videos are written as width x height where the first is larger, and as height x width elsewhere.
    height, width = (min(first, second), max(first, second)) if subject.frames > 1 else (second, first)
    size = Size(height=height, width=width, frames=row.get("frames") or subject.frames, batch=1)
    names = ("model", "resolution", "frames", "steps", "gpu", "link", "compiled", "source")
    group = ", ".join(str(row[name]) for name in names if row.get(name) is not None)
    steps = row.get("steps") or subject.steps
    if link == "nvlink" and device == "a100":
        link = "nvlink3"
    return Point(
        group,
        row["n_gpus"],
        row["method"],
        row["seconds"],
        size,
        steps,
        _MODELS[model],
        device,
        link,
        bool(row.get("compiled")),
        row["source"],
    )


class Group:
    """Predicts the rows of one model, size, device, link and source.

    Args:
        points: the rows.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        first = points[0]
        self.points, self.name = tuple(points), first.group
        self.subject: Subject = subject_named(first.model)
        self.tracer = Tracer(self.subject, first.size)
        self._times: dict[tuple[Point, float, float], GenerationTime] = {}

    def predict(self, point: Point, compute: float = 1.0, beside: float = 1.0, repeated: float = REPEATED) -> float:
        """Predicts the seconds of a row.

        Args:
            point: the row.
            compute: how many times as long work takes as on the device that data sheets describe.
            beside: the same for messages and for the host.
            repeated: what devices do beside their part, as a share of the time of one.
        """
        key = point, compute, beside
        if key not in self._times:
            self._times[key] = self._time(*key)
        time = self._times[key]
        return time.seconds + (repeated - 1.0) * time.repeated

    def _time(self, point: Point, compute: float, beside: float) -> GenerationTime:
        device, link = DEVICES[point.device], LINKS[point.link]
        host = {"dispatch": device.dispatch * beside, "attend": device.attend * beside}
        device = replace(device.slower(compute), **host, fused=point.compiled, repeated=1.0)
        machine = Machine(device=device, link=link.slower(beside), ranks=point.ranks, per_node=8)
        traced = self.tracer.trace(point.mix, point.ranks, point.steps)
        return clock_generation(traced, self.tracer, machine, point.steps, 1)

    def _can_run(self, point: Point) -> bool:
        try:
            self.predict(point)
        except PartsongError:
            return False
        return True

    def fit(self, repeated: float = REPEATED, most: int = 2) -> tuple[float, float]:
        """Returns the two constants that suit the rows of few devices best, near 1 where they say little.

        Args:
            repeated: as for `predict`.
            most: devices of a row that is known.
        """
        known = [point for point in self.points if point.ranks <= most and self._can_run(point)]

        @functools.cache
        def loss(compute: float, beside: float) -> float:
            two = math.exp(compute), math.exp(beside)
            errors = (math.log(self.predict(p, *two, repeated) / p.seconds) for p in known)
            near = (compute / _COMPUTE) ** 2 + (beside / _BESIDE) ** 2
            return sum((error / _ERROR) ** 2 for error in errors) + near

        # Where the host is the slowest part and where a device is, there may be a minimum each.
        start = min(((i * 0.2, j * 0.4) for i in range(-3, 4) for j in range(-2, 6)), key=lambda pair: loss(*pair))
        (compute, beside), step = start, 0.1
        while step > 0.01:
            around = [(compute + i * step, beside + j * step) for i in (-1, 0, 1) for j in (-1, 0, 1)]
            best = min(around, key=lambda pair: loss(*pair))
            step, (compute, beside) = step if best != (compute, beside) else step / 2, best
        return math.exp(compute), math.exp(beside)


def groups_of(points: Iterable[Point]) -> list[Group]:
    """Sorts rows into groups that may be compared."""
    by_name: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_name[point.group].append(point)
    return [Group(rows) for rows in by_name.values()]


def run(file: Path = DATA) -> list[dict[str, Any]]:
    """Predicts every row, with constants from data sheets and with two fitted ones where there are rows to fit.

    Args:
        file: rows as in `DATA`.

    Returns:
        One dict per row: ``group ranks method seconds predicted error fitted fitted_error held_out``. Where
        ``held_out`` is true, the row took no part in fitting.
    """
    points, _ = read_points(file)
    rows = []
    for group in groups_of(points):
        has_both = {1, 2} <= {point.ranks for point in group.points}
        constants = group.fit() if has_both else None
        for point in group.points:
            try:
                rows.append(_row(group, point, constants))
            except PartsongError as problem:
                rows.append(
                    {"group": group.name, "ranks": point.ranks, "method": point.method, "refused": str(problem)}
                )
    return rows


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns how large the errors are: medians, nine in ten, and how many pairs of a group are in the right order.

    Args:
        rows: of `run`.
    """
    shown = [row for row in rows if "refused" not in row]
    held = [abs(row["fitted_error"]) for row in shown if row["held_out"]]
    plain = [abs(row["error"]) for row in shown]
    right = [
        (one["fitted"] < other["fitted"]) == (one["seconds"] < other["seconds"])
        for one, other in itertools.combinations(shown, 2)
        if one["group"] == other["group"] and None not in (one["fitted"], other["fitted"])
        if one["seconds"] != other["seconds"] and one["fitted"] != other["fitted"]
    ]
    return {
        "held_out": len(held),
        "held_out_median": quantile(held, 0.5),
        "held_out_p90": quantile(held, 0.9),
        "pairs": len(right),
        "pairs_ordered": sum(right) / max(1, len(right)),
        "profiles_only": len(plain),
        "profiles_only_median": quantile(plain, 0.5),
        "profiles_only_p90": quantile(plain, 0.9),
    }


def quantile(values: Sequence[float], share: float) -> float | None:
    """Returns the value below which a share of the values lies; None where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _row(group: Group, point: Point, constants: tuple[float, float] | None) -> dict[str, Any]:
    plain = group.predict(point)
    fitted = None if constants is None else group.predict(point, *constants)
    return {
        "group": group.name,
        "ranks": point.ranks,
        "method": point.method,
        "seconds": point.seconds,
        "predicted": plain,
        "error": plain / point.seconds - 1,
        "fitted": fitted,
        "fitted_error": None if fitted is None else fitted / point.seconds - 1,
        "held_out": fitted is not None and point.ranks > 2,
        "constants": constants,
    }
