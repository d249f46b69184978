"""Chooses among mixes of strategies by their estimates, and says why the others are left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partsong.errors import ArgumentError
from partsong.parallel.strategy import Strategy
from partsong.planner.estimate import Estimate, flags
from partsong.planner.hardware import Machine
from partsong.planner.measured import FEWEST_STEPS
from partsong.planner.memory import fits
from partsong.planner.subject import Subject

__all__ = ["CLEAR", "Advice", "Refusal", "choose"]

#: How many times as fast as one device a mix has to be before it is worth its ranks.
CLEAR = 1.1


@dataclass(frozen=True, slots=True)
class Refusal:
    """Says why a mix cannot run.

    Attributes:
        strategy: the mix, as the command line writes it.
        reason: why not.
    """

    strategy: str
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """Holds the outcome of planning for a model on a machine.

    Attributes:
        rows: one estimate for each legal mix, best first.
        refused: the other mixes.
        serial: the estimate of one device, whether it fits or not.
        machine: what was planned for.
        fits_serial: whether one device holds the model.
        idle: devices that there are besides, with which it would take no less.
    """

    rows: tuple[Estimate, ...]
    refused: tuple[Refusal, ...]
    serial: Estimate
    machine: Machine
    fits_serial: bool
    idle: int = 0

    @property
    def choice(self) -> Estimate:
        """Returns the best mix, or one device where predictions cannot tell that it is slower."""
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
        fewer = f" The other {self.idle} devices would not make it faster." if self.idle else ""
        return f"{best.strategy} takes {best.seconds:.3g} s, {beside}: {best.reason}.{fewer}"


def choose(
    subject: Subject,
    machine: Machine,
    steps: int,
    serial: Estimate,
    others: Iterable[tuple[Sequence[Strategy], Estimate | str]],
    max_drift: float,
) -> Advice:
    """Ranks mixes that run, fit and drift no further than allowed, and says why each of the others is left out.

    Args:
        subject: the model.
        machine: what the ranks run on.
        steps: of a generation.
        serial: the estimate of one device.
        others: each mix with its estimate, or with the reason for which it cannot run.
        max_drift: as for `recommend`.

    Raises:
        ArgumentError: nothing fits; says what would.
    """
    rows: list[Estimate] = []
    too_large: list[Estimate] = []
    refused: list[Refusal] = []
    for mix, row in others:
        if isinstance(row, str):
            refused.append(Refusal(flags(mix), row))
        elif row.drift and steps < FEWEST_STEPS:
            why = f"how far pictures stray was measured from {FEWEST_STEPS} steps on; at {steps} nothing is known"
            refused.append(Refusal(row.strategy, why))
        elif row.drift > max_drift:
            why = f"pictures stray by {row.drift:.2g} (root mean square); {max_drift:g} is allowed"
            refused.append(Refusal(row.strategy, why))
        elif not fits(row.memory, machine.device):
            why = f"needs {row.memory / 1e9:.1f} GB of a device that has {machine.device.memory / 1e9:.0f} GB"
            refused.append(Refusal(row.strategy, why))
            too_large.append(row)
        else:
            rows.append(row)
    fits_serial = fits(serial.memory, machine.device)
    if fits_serial and machine.ranks > 1:
        rows.append(serial)
    if not rows:
        raise ArgumentError(_nothing_fits(subject, [serial, *too_large], refused, machine))
    rows.sort(key=lambda row: (row.seconds, len(row.strategies)))
    return Advice(tuple(rows), tuple(refused), serial, machine, fits_serial)


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
