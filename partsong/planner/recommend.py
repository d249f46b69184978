"""Recommends a mix of strategies for a model on a machine: the model is traced, clocked, estimated and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from partsong.errors import ArgumentError
from partsong.parallel.strategy import Strategy
from partsong.planner.choice import CLEAR, Advice, choose
from partsong.planner.estimate import Estimate
from partsong.planner.estimates import estimates, offloaded_estimates
from partsong.planner.hardware import Device, Link, Machine
from partsong.planner.machines import machine_named
from partsong.planner.memory import fits
from partsong.planner.mixes import mixes_for
from partsong.planner.models import subject_named
from partsong.planner.pipeline import subject_of
from partsong.planner.steps import Tracer
from partsong.planner.subject import Subject

__all__ = ["advise", "advise_number", "recommend"]


def recommend(
    model: Any,
    *,
    devices: str | Device,
    link: str | Link = "pcie4",
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    steps: int | None = None,
    batch: int = 1,
    max_drift: float = 0.0,
    memory: float | None = None,
    per_node: int | None = None,
    across: str | Link | None = None,
) -> list[Estimate]:
    """Predicts every legal mix of strategies for a model on a machine, and ranks them by time.

    The first is never slower than one device, unless one device cannot hold the model. Nothing is computed: calls run
    on shapes, with a clock for each device and link.

    Args:
        model: a name of `partsong.planner.MODELS`, or a diffusers pipeline.
        devices: ``4x4090``, a name of one device, or one that was measured.
        link: between devices: a name, or what was measured.
        height: pixels; None takes the model's own.
        width: pixels; None takes the model's own.
        frames: of a video; None takes the model's own.
        steps: None takes what the model's authors advise.
        batch: pictures or videos that are made at once.
        max_drift: root mean square difference of pixels in [0, 1] that is allowed; 0 allows exact strategies only.
        memory: bytes of a device; None takes what it has.
        per_node: devices of a node; None takes all.
        across: the link between nodes; None takes `link`.

    Returns:
        One estimate for each mix that is legal and fits, best first.

    Raises:
        ArgumentError: an unknown name, a size that the model cannot make, or nothing that fits; says what would.

    Example:
        >>> best = recommend("flux-dev", devices="4x4090", link="pcie4")[0]
        >>> best.kind
        'exact'
    """
    machine = machine_named(devices, link, memory=memory, per_node=per_node, across=across)
    subject = subject_named(model) if isinstance(model, str) else subject_of(model)
    advice = advise(
        subject, machine, height=height, width=width, frames=frames, steps=steps, batch=batch, max_drift=max_drift
    )
    return list(advice.rows)


def advise(
    subject: Subject,
    machine: Machine,
    *,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    steps: int | None = None,
    batch: int = 1,
    max_drift: float = 0.0,
    only: Sequence[Sequence[Strategy]] | None = None,
    tracer: Tracer | None = None,
    processes: int = 1,
) -> Advice:
    """Compares mixes for a model on a machine.

    Args:
        subject: the model.
        machine: the devices and their links.
        height: pixels; None takes the model's own.
        width: pixels; None takes the model's own.
        frames: of a video; None takes the model's own.
        steps: None takes what the model's authors advise.
        batch: pictures or videos that are made at once.
        max_drift: as for `recommend`.
        only: the mixes to compare; None takes all.
        tracer: what was traced for another machine with this model and size; None begins anew.
        processes: how many trace calls at the same time; see `estimates`.

    Raises:
        ArgumentError: a size that the model cannot make, or nothing that fits; says what would.
    """
    size, steps = subject.sized(height, width, frames, batch), steps or subject.steps
    mixes = mixes_for(subject, machine.ranks, batch, exact=max_drift == 0.0) if only is None else map(tuple, only)
    tracer = Tracer(subject, size, fused=not machine.device.host) if tracer is None else tracer
    serial, others = estimates(tracer, mixes, machine, steps, processes)
    rows = [row for _, row in others if not isinstance(row, str)]
    is_held = any(fits(row.memory, machine.device) and row.drift <= max_drift for row in rows)
    if only is None and not machine.device.host and not is_held:
        others += offloaded_estimates(tracer, rows, machine, steps, processes)
    return choose(subject, machine, steps, serial, others, max_drift)


def advise_number(subject: Subject, machine: Machine, **asked: Any) -> Advice:
    """Compares mixes for a model, and takes fewer devices where these are faster.

    Half of the devices are tried where all of them bring no more than half of their number, and so on.

    Args:
        subject: the model.
        machine: the devices and their links.
        **asked: the same as of `advise`.

    Returns:
        The advice for the number of devices that it is best for; `Advice.idle` is the number of the others.

    Raises:
        ArgumentError: a size that the model cannot make, or nothing that fits on all devices; says what would.
    """
    if asked.get("tracer") is None:  # what it traces serves every number of devices
        height, width, frames = (asked.get(name) for name in ("height", "width", "frames"))
        size = subject.sized(height, width, frames, asked.get("batch", 1))
        asked["tracer"] = Tracer(subject, size, fused=not machine.device.host)
    best, part = advise(subject, machine, **asked), machine
    while part.ranks > 2 and part.ranks % 2 == 0 and 2 * best.serial.seconds <= part.ranks * best.choice.seconds:
        half = part.ranks // 2
        part = replace(part, ranks=half, per_node=min(half, part.per_node))
        try:
            fewer = advise(subject, part, **asked)
        except ArgumentError:  # the model does not fit so few
            break
        if fewer.choice.seconds < best.choice.seconds / CLEAR:
            best = replace(fewer, idle=machine.ranks - half)
    return best
