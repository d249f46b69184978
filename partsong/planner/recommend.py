"""Compares every legal mix of strategies for a model on a machine, and recommends one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from partsong.errors import ArgumentError
from partsong.parallel.strategy import Strategy
from partsong.planner.calls import Size
from partsong.planner.denoising import Tracer
from partsong.planner.estimate import Estimate, estimate, fits, flags
from partsong.planner.estimates import estimates
from partsong.planner.hardware import Device, Link, Machine
from partsong.planner.machines import machine_named
from partsong.planner.measured import FEWEST_STEPS
from partsong.planner.mixes import mixes_for
from partsong.planner.subject import Subject, subject_named, subject_of

__all__ = ["Advice", "Refusal", "advise", "recommend"]

#: How many times as fast as one device a mix has to be before it is worth its ranks.
CLEAR = 1.1


@dataclass(frozen=True, slots=True)
class Refusal:
    """Says why a mix cannot run.

    Attributes:
        strategy: the mix, as the command line writes it.
        reason: what stands against it.
    """

    strategy: str
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """Holds what a plan for a model on a machine came to.

    Attributes:
        rows: one estimate for each legal mix, best first.
        refused: the other mixes.
        serial: the estimate of one device, whether it fits or not.
        machine: what was planned for.
        fits_serial: whether one device holds the model.
    """

    rows: tuple[Estimate, ...]
    refused: tuple[Refusal, ...]
    serial: Estimate
    machine: Machine
    fits_serial: bool

    @property
    def choice(self) -> Estimate:
        """Returns the best mix; one device where that is as fast, by what predictions can tell apart."""
        is_close = self.fits_serial and self.rows[0].seconds > self.serial.seconds / CLEAR
        return self.serial if is_close else self.rows[0]

    @property
    def sentence(self) -> str:
        """Says in one sentence what to use and why."""
        best = self.choice
        against = self.serial.seconds / best.seconds
        if not best.strategies:
            return f"One device is as fast as any mix here, or nearly: {best.seconds:.3g} s ({best.reason})."
        beside = f"{against:.2f}x as fast as one device" if self.fits_serial else "which one device cannot hold"
        return f"{best.strategy} takes {best.seconds:.3g} s, {beside}: {best.reason}."


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
    advice = advise(
        subject_named(model) if isinstance(model, str) else subject_of(model),
        machine,
        height=height,
        width=width,
        frames=frames,
        steps=steps,
        batch=batch,
        max_drift=max_drift,
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
    size = Size(
        height=height or subject.height,
        width=width or subject.width,
        frames=frames or subject.frames,
        batch=batch,
        dtype=subject.dtype,
    )
    subject.check(size.height, size.width, size.frames)
    steps = steps or subject.steps
    tracer = Tracer(subject, size) if tracer is None else tracer
    alone = Machine(device=machine.device, link=machine.link, ranks=1, per_node=1)
    serial = estimate(tracer, (), alone, steps)
    mixes = mixes_for(subject, machine.ranks, batch, exact=max_drift == 0.0) if only is None else map(tuple, only)
    rows, too_large, refused = _compared(tracer, mixes, machine, steps, max_drift, processes)
    fits_serial = fits(serial.memory, machine.device)
    if fits_serial and machine.ranks > 1:
        rows.append(serial)
    if not rows:
        raise ArgumentError(_nothing_fits(subject, [serial, *too_large], refused, machine))
    rows.sort(key=lambda row: (row.seconds, len(row.strategies)))
    return Advice(tuple(rows), tuple(refused), serial, machine, fits_serial)


def _compared(
    tracer: Tracer,
    mixes: Iterable[tuple[Strategy, ...]],
    machine: Machine,
    steps: int,
    max_drift: float,
    processes: int,
) -> tuple[list[Estimate], list[Estimate], list[Refusal]]:
    """Returns the mixes that run, those that do not fit, and reasons against all that are not among the first."""
    rows: list[Estimate] = []
    too_large: list[Estimate] = []
    refused: list[Refusal] = []
    for mix, row in estimates(tracer, mixes, machine, steps, processes):
        if isinstance(row, str):
            refused.append(Refusal(flags(mix), row))
        elif row.drift and steps < FEWEST_STEPS:
            why = f"how far pictures stray was measured from {FEWEST_STEPS} steps on; at {steps} nothing is known"
            refused.append(Refusal(row.strategy, why))
        elif row.drift > max_drift:
            why = f"pictures stray by {row.drift:.2g} (root mean square); {max_drift:g} is allowed"
            refused.append(Refusal(row.strategy, why))
        elif not fits(row.memory, machine.device):
            refused.append(Refusal(row.strategy, _too_large(row, machine.device)))
            too_large.append(row)
        else:
            rows.append(row)
    return rows, too_large, refused


def _too_large(row: Estimate, device: Device) -> str:
    return f"needs {row.memory / 1e9:.1f} GB of a device that has {device.memory / 1e9:.0f} GB"


def _nothing_fits(subject: Subject, rows: Sequence[Estimate], refused: Sequence[Refusal], machine: Machine) -> str:
    least = min(rows, key=lambda row: row.memory)
    device, ranks = machine.device, machine.ranks
    if least.strategies or ranks == 1:
        need = (
            f"the least that {subject.name} needs here is {least.memory / 1e9:.1f} GB a device, with {least.strategy}"
        )
    else:
        why = f"; the first reason: {refused[0].reason}" if refused else ""
        return f"no mix of strategies runs {subject.name} on {ranks} devices within these bounds{why}"
    more = "a smaller size, quantised weights" if ranks > 1 else "several devices with ShardedWeights, a smaller size"
    return (
        f"{subject.name} does not fit: {need}, and a {device.name} has {device.memory / 1e9:.0f} GB; use {more}, or a "
        f"device of at least {least.memory / 0.92 / 1e9:.0f} GB"
    )
