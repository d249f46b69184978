"""Checks that all ranks were given the same values, by comparing a few numbers for each value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.mesh import Axis

__all__ = ["AGREED_STEPS", "NUMBERS_PER_VALUE", "check_alike"]

#: The first steps of a generation, in which ranks compare what they were given.
AGREED_STEPS = 2

NUMBERS_PER_VALUE = 4


def check_alike(axis: Axis, given: Mapping[str, Any]) -> None:
    """Refuses values that differ between ranks, on all ranks alike.

    Args:
        axis: the ranks that compare.
        given: this rank's tensors and containers of tensors by name; every rank gives the same names.

    Raises:
        ArgumentError: a value differs; names the rank and the value.
    """
    size = NUMBERS_PER_VALUE
    values = [number for value in given.values() for number in _fingerprint(value)]
    table = agree(axis, values, name="comparison of the ranks' inputs")
    for rank, row in zip(axis.ranks, table, strict=True):
        for position, name in enumerate(given):
            mine, other = table[0][size * position :][:size], row[size * position :][:size]
            if not _alike(mine, other):
                raise ArgumentError(
                    f"rank {rank} was given another {name} than rank {axis.ranks[0]}; make the same call on every "
                    "rank, with the same prompt, sizes and generator=torch.Generator().manual_seed(n)"
                )


def _fingerprint(value: Any) -> list[float]:
    """Sums a tensor, or all tensors in a container, up to four numbers that other values would not share."""
    if isinstance(value, (list, tuple, dict)):
        items = list(value.values() if isinstance(value, dict) else value)
        prints = [_fingerprint(item) for item in items]
        # Each place has its own weight, so the same tensors in another order differ.
        ramps = [number[3] * (1 + 1 / (2 + place)) for place, number in enumerate(prints)]
        return [*(sum(number[i] for number in prints) for i in range(3)), sum(ramps)]
    if not isinstance(value, Tensor):
        return [0.0] * NUMBERS_PER_VALUE
    flat = value.detach().flatten().double()
    ramp = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device).remainder(97)
    return [float(flat.numel()), flat.sum().item(), flat.abs().sum().item(), (flat * ramp).sum().item()]


def _alike(one: list[float], other: list[float]) -> bool:
    # This allows for the rounding of a GPU's sums, and lies far below what another prompt or seed changes.
    slack = 1e-4 * (one[2] + 1e-12)
    return one[0] == other[0] and all(
        abs(a - b) <= slack * w or (math.isnan(a) and math.isnan(b))
        for a, b, w in zip(one[1:], other[1:], (1, 1, 97), strict=True)
    )
