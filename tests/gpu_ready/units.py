"""Counts what one more unit of work costs a GPU's host: a step of decoding, a block of a video, a turn of a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from partsong.ledger import Ledger
from tests.gpu_ready.operators import Operators

__all__ = ["Unit", "of_partsong", "per_unit", "slope"]


@dataclass(frozen=True)
class Unit:
    """What partsong's own code does in one unit.

    Attributes:
        waits: of the host, by what waits and where.
        late: numbers that were on their way to the host since the step before.
        uploads: of Python's numbers to the device, for which the host waits as well.
        messages: that are sent.
    """

    waits: dict[str, float]
    late: dict[str, float]
    uploads: dict[str, float]
    messages: float


def slope(one: Counter[str], other: Counter[str], more: float) -> dict[str, float]:
    """What differs between two counts, shared out over the units that the second has more."""
    return {name: (other[name] - one[name]) / more for name in other | one if other[name] != one[name]}


def of_partsong(counts: dict[str, float]) -> dict[str, float]:
    """The counts of partsong's own code; what models and pipelines do themselves is left out."""
    return {name: times for name, times in counts.items() if " partsong/" in name}


def per_unit(work: Callable[[int], float], lengths: tuple[int, int], *, warm: bool = True) -> Unit:
    """What a unit costs: the difference of two lengths of work.

    Args:
        work: makes work of a length, and returns how many units it was.
        lengths: both past every warm-up.
        warm: whether work of each length is made once before, uncounted, as where it leaves something for the next.
    """
    seen: list[tuple[Operators, float, float]] = []
    for length in lengths:
        if warm:
            work(length)
        with Operators(tile=1 << 20) as operators, Ledger(flops=False) as ledger:
            units = work(length)
        seen.append((operators, units, ledger.summary().get("messages", 0.0)))
    (one, units, sent), (other, more_units, sent_more) = seen
    more = more_units - units
    kinds = ("waits", "late", "uploads")
    slopes = (of_partsong(slope(getattr(one, kind), getattr(other, kind), more)) for kind in kinds)
    return Unit(*slopes, messages=(sent_more - sent) / more)
