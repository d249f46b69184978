"""Turns measurements of a machine into the numbers that predictions use, and keeps them in a small file."""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from partsong.accelerator import total_memory
from partsong.calibration_files import FILE_NAME, calibration_folder
from partsong.cores import usable_cores
from partsong.errors import ArgumentError
from partsong.outputs import write_text
from partsong.parallel.ranks.launch import launch
from partsong.planner.clock import replay
from partsong.planner.hardware import Device, Link, Machine
from partsong.planner.measuring import LINK_SIZES, SMALL, measure, probe_call, probe_model
from partsong.planner.operators import QUERY_ROWS, TILE
from partsong.planner.this_machine import hardware_name
from partsong.planner.trace import CallTrace, trace_calls

__all__ = [
    "Calibration",
    "calibrate",
    "calibrate_here",
    "calibration_folder",
    "find_calibration",
    "probe_trace",
    "read_calibration",
]

#: More seconds than an operator costs any host, and how often the range below is halved: to less than a thousandth.
_SLOW, _HALVINGS = 1e-3, 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Holds what was measured of one machine.

    Attributes:
        name: of the hardware and the number of ranks.
        device: what a rank computes on, while all ranks compute.
        link: between ranks.
        ranks: how many there were.
        slots: how many ranks compute at the same time without slowing each other down.
        alone: a rank's time for a step while all others wait, relative to all at work: caches and memory are shared.
        spread: largest ratio between a measured step and its prediction, as a number above 1.
        raw: seconds as measured.
    """

    name: str
    device: Device
    link: Link
    ranks: int
    slots: int
    alone: float
    spread: float
    raw: Mapping[str, Any]

    def machine(self, ranks: int) -> Machine:
        """Returns this machine with another number of ranks, which slow each other down where cores are too few."""
        crowd = max(1.0, ranks / self.slots) / max(1.0, self.ranks / self.slots)
        crowd = self.alone if ranks == 1 else crowd  # measured, so the crowding is included
        return Machine(device=self.device.slower(crowd), link=self.link, ranks=ranks, per_node=ranks)

    def write(self, file: Path) -> None:
        """Writes it as JSON."""
        write_text(file, json.dumps(asdict(self), indent=1) + "\n")


def calibrate(nproc: int, *, threads: int | None = 1) -> Calibration:
    """Measures this machine with a number of ranks, in less than a minute.

    Args:
        nproc: ranks that are started.
        threads: of each; None is what torch takes by itself.

    Example:
        >>> # calibrate(2).write(Path("machine.json"))
    """
    return understand(launch(measure, nproc, threads))


def calibrate_here(*, threads: int | None = 1) -> Calibration | None:
    """Measures the machines of a program that torchrun has started; call it on every rank.

    Returns:
        What was measured on the first rank, None on the others.
    """
    raw = measure(threads)
    return understand(raw) if os.environ.get("RANK", "0") == "0" else None


def understand(raw: Mapping[str, Any]) -> Calibration:
    """Finds the numbers that explain raw seconds best.

    Args:
        raw: what `measure` returned.
    """
    ranks, cores = raw["ranks"], usable_cores()
    slots = max(1, cores // raw["threads"]) if raw["device"] == "cpu" else ranks
    device = _with_dispatch(_device(raw), raw)
    link = _link(raw, device) if ranks > 1 else Link(name="none", latency=0.0, bandwidth=math.inf, measured=True)
    ratios = _step_ratios(raw, device)
    # The cost of an operator was measured on whole steps already, so it is not slowed down with the rest.
    device = _with_dispatch(device.slower(math.exp(statistics.fmean(map(math.log, ratios)))), raw)
    spread = max(max(ratios) / statistics.geometric_mean(ratios), statistics.geometric_mean(ratios) / min(ratios))
    alone = statistics.geometric_mean([raw["alone"][tokens] / raw["steps"][tokens] for tokens in raw["steps"]])
    name = f"{device.name}-{ranks}-ranks"
    return Calibration(
        name=name, device=device, link=link, ranks=ranks, slots=slots, alone=alone, spread=spread, raw=raw
    )


def _device(raw: Mapping[str, Any]) -> Device:
    dispatch = raw["dispatch"] / 100
    products = {rows: (2.0 * rows * 1024 * 1024, rows * 1024 / TILE, s) for rows, s in raw["matmul"].items()}
    flops, _, seconds = products[max(products)]
    rate = flops / max(seconds - dispatch, 1e-9)
    # How much longer small products take says how many tiles are computed at once.
    units = [2 * t * max(0.0, (s - dispatch) * rate / f - 1) for f, t, s in products.values()]
    keys = max(raw["attention"])
    attended = 4.0 * 8 * keys * keys * 64
    waves = 1 + 0.5 * statistics.median(units) / (8 * keys / QUERY_ROWS)
    attention = attended * waves / max(raw["attention"][keys] - dispatch, 1e-9)
    itemsize = 4 if raw["device"] == "cpu" else 2
    speeds = {3 * itemsize * numbers: 3 * itemsize * numbers / max(s, 1e-9) for numbers, s in raw["memory"].items()}
    bandwidth = speeds[max(speeds)]
    cached = [size for size, speed in speeds.items() if speed > 2 * bandwidth]
    return Device(
        name=hardware_name(),
        flops=rate,
        bandwidth=bandwidth,
        memory=float(total_memory(torch.device(raw["device"]))),
        cache=float(max(cached, default=0)),
        units=max(0, round(statistics.median(units))),
        matmul=1.0,
        attention=attention / rate,
        dispatch=dispatch,
        least=0.0,
        host=raw["device"] == "cpu",
        source="measured on this machine",
        measured=True,
    )


def _with_dispatch(device: Device, raw: Mapping[str, Any]) -> Device:
    """Returns the device with what a model's operator really costs the host: Python around it is most of that."""
    trace = probe_trace(SMALL, raw["device"], small=True)
    low, high = raw["dispatch"] / 100, _SLOW
    for _ in range(_HALVINGS):  # the longer an operator takes the host, the longer the step
        middle = math.sqrt(low * high)
        is_longer = replay(trace, _alone(replace(device, dispatch=middle))).steady > raw["small"]
        low, high = (low, middle) if is_longer else (middle, high)
    return replace(device, dispatch=low)


def _alone(device: Device) -> Machine:
    link = Link(name="none", latency=0.0, bandwidth=math.inf)
    return Machine(device=device, link=link, ranks=1, per_node=1)


def _link(raw: Mapping[str, Any], device: Device) -> Link:
    rows = {(row["form"], row["bytes"]): row["seconds"] for row in raw["messages"] if row["form"] != "pair"}
    ranks, (small, *_, large) = raw["ranks"], LINK_SIZES
    latency = rows["ring", small]
    others = ranks - 1
    per_message = max(0.0, rows["all-to-all", small] - latency) / max(1, others - 1) if others > 1 else 0.0
    shared = rows["ring", large] > 1.5 * rows["one way", large] and device.host
    at_once = large * others * (ranks if shared else 1)
    bandwidth = at_once / max(rows["all-to-all", large] - latency - per_message * (others - 1), 1e-9)
    overlap = raw["overlap"]
    busy = (overlap["both"] - max(overlap["products"], overlap["message"])) / overlap["message"]
    return Link(
        name="measured",
        latency=latency,
        bandwidth=bandwidth,
        per_message=per_message,
        shared=shared,
        busy=min(1.0, max(0.0, busy)) if device.host else 0.0,
        source="measured on this machine",
        measured=True,
    )


def _step_ratios(raw: Mapping[str, Any], device: Device) -> list[float]:
    """Returns measured over predicted seconds of a denoiser's step at each number of tokens."""
    return [
        seconds / replay(probe_trace(int(tokens), raw["device"]), _alone(device)).steady
        for tokens, seconds in raw["steps"].items()
    ]


@functools.lru_cache(maxsize=16)
def probe_trace(tokens: int, device: str, *, small: bool = False) -> CallTrace:
    """Traces a step of the model that was timed.

    Args:
        tokens: of its picture.
        device: the kind that it ran on.
        small: whether it was the small one.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device("meta"):
        model = probe_model(small=small).to(dtype)
    return trace_calls(model, [], 1, probe_call(tokens, dtype, small=small))


def find_calibration(ranks: int) -> Calibration | None:
    """Returns what was measured of this machine with the nearest number of ranks; None where nothing was.

    Raises:
        ArgumentError: a file that cannot be read.
    """
    pattern = FILE_NAME.format(hardware=hardware_name())
    known = [read_calibration(file) for file in sorted(calibration_folder().glob(pattern))]
    return min(known, key=lambda each: (abs(math.log(each.ranks / ranks)), each.ranks), default=None)


def read_calibration(file: Path) -> Calibration:
    """Reads a calibration.

    Raises:
        ArgumentError: the file cannot be read, or is none.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return Calibration(**{**data, "device": Device(**data["device"]), "link": Link(**data["link"])})
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise ArgumentError(f"{file} is no calibration ({problem}); run `partsong calibrate` again") from problem
