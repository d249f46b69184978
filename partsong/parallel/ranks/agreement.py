"""Checks that all ranks were given the same values, by comparing a few numbers for each value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partsong.accelerator import is_on_host
from partsong.errors import ArgumentError
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.later import Later, agree_later
from partsong.parallel.ranks.mesh import Axis

__all__ = ["AGREED_STEPS", "DTYPES", "NUMBERS_PER_VALUE", "Comparison", "check_alike"]

#: First steps of a generation in which ranks compare all their inputs. Later they compare only latents.
AGREED_STEPS = 2

NUMBERS_PER_VALUE = 4

#: The types of tensors. A message in another type than its receiver expects would end the process, so their numbers
#: are compared.
DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))

#: Positions after which the weights of values repeat.
_PERIOD = 97

_ADVICE = "make the same call on every rank, with the same prompt, sizes and generator=torch.Generator().manual_seed(n)"


def check_alike(axis: Axis, given: Mapping[str, Any], *, advice: str = _ADVICE) -> None:
    """Refuses values that differ between ranks, on all ranks alike.

    Args:
        axis: the ranks that compare.
        given: this rank's tensors and containers of tensors by name; every rank gives the same names.
        advice: what to do where they differ.

    Raises:
        ArgumentError: a value differs; names the rank and the value.
    """
    numbers = torch.stack([_fingerprint(value).cpu() for value in given.values()]).flatten()
    table = agree(axis, numbers.tolist(), name="comparison of the ranks' inputs")
    for position, name in enumerate(given):
        rank = _odd_one(axis, [row[NUMBERS_PER_VALUE * position :][:NUMBERS_PER_VALUE] for row in table])
        if rank is not None:
            raise ArgumentError(f"rank {rank} was given another {name} than rank {axis.ranks[0]}; {advice}")


class Comparison:
    """Compares one value per step between ranks while they continue, and reports a difference a step later.

    No rank waits: the few numbers are sent while the step is computed, and are checked in the next one.

    Args:
        axis: the ranks that compare.
        name: what is compared, for messages.
    """

    def __init__(self, axis: Axis, name: str) -> None:
        self.axis, self.name = axis, name
        self._posted: tuple[Later, int] | None = None

    def post(self, value: Any, step: int) -> None:
        """Sends this rank's numbers for a tensor or a container of tensors of a step."""
        numbers = _fingerprint(value)
        if not (self.axis.is_fused or is_on_host(numbers.device)):
            numbers = numbers.cpu()
        self._posted = agree_later(self.axis, numbers, name=f"comparison of the ranks' {self.name}"), step

    def check(self) -> None:
        """Checks the numbers that have arrived.

        Raises:
            ArgumentError: a rank had another value; names the rank, the value and the step.
        """
        if self._posted is not None:
            (later, step), self._posted = self._posted, None
            self._judge(later.read(), step)

    def _judge(self, table: Sequence[Sequence[float]], step: int) -> None:
        rank = _odd_one(self.axis, table)
        if rank is not None:
            raise ArgumentError(
                f"in step {step} rank {rank} had another {self.name} than rank {self.axis.ranks[0]}; a callback that "
                "changes what the next step is given must do the same on every rank"
            )

    def abandon(self) -> None:
        """Forgets what was sent without waiting."""
        self._posted = None


def _odd_one(axis: Axis, table: Sequence[Sequence[float]]) -> int | None:
    """Returns the first rank whose numbers differ from those of the axis' first; None where all are equal."""
    pairs = zip(axis.ranks, table, strict=True)
    return next((rank for rank, row in pairs if not _alike(table[0], row)), None)


def _fingerprint(value: Any) -> Tensor:
    """Reduces a tensor, or all tensors in a container, to four numbers that differ for other values or types."""
    if isinstance(value, (list, tuple, dict)):
        items = list(value.values() if isinstance(value, dict) else value)
        prints = [_fingerprint(item) for item in items]
        device = next((one.device for one in prints if one.device.type != "cpu"), torch.device("cpu"))
        total = torch.zeros(NUMBERS_PER_VALUE, dtype=torch.float64, device=device)
        for place, numbers in enumerate(prints):
            total += numbers.to(device)
            total[-1] += numbers[-1].to(device) / (2 + place)  # the same tensors in another order differ
        return total
    if not isinstance(value, Tensor):
        return torch.zeros(NUMBERS_PER_VALUE, dtype=torch.float64)
    value = torch.view_as_real(value) if value.is_complex() else value
    sums = _sums(value.detach().flatten())
    sums[0] += DTYPES.index(value.dtype) / len(DTYPES)  # a part of one more value
    return sums


def _sums(flat: Tensor) -> Tensor:
    """Returns the number of values, their sum, the sum of their sizes, and a sum weighted by position.

    It neither copies the values nor sends a number from the host, since it runs in every step.
    """
    whole = len(flat) // _PERIOD * _PERIOD
    ramp = torch.arange(1, _PERIOD + 1, dtype=torch.float64, device=flat.device).remainder_(_PERIOD)
    columns = flat[:whole].view(-1, _PERIOD).sum(dim=0, dtype=torch.float64)
    columns[: len(flat) - whole] += flat[whole:]
    sizes = flat if flat.is_floating_point() else flat.double()
    total = sizes.new_full((), len(flat), dtype=torch.float64)
    return torch.stack([total, columns.sum(), torch.linalg.vector_norm(sizes, 1, dtype=torch.float64), columns @ ramp])


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    # This allows for the rounding of a GPU's sums, and is far below the effect of another prompt or seed.
    slack = 1e-4 * (one[2] + 1e-12)
    return one[0] == other[0] and all(
        abs(a - b) <= slack * w or (math.isnan(a) and math.isnan(b))
        for a, b, w in zip(one[1:], other[1:], (1, 1, _PERIOD), strict=True)
    )
