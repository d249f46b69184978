"""Estimates the cost of a step over several tokens, so that a draft is only as long as pays off."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal

from partsong.errors import ArgumentError

__all__ = ["costs_by_tokens", "usual_costs"]

#: Time of a step over some tokens relative to one token, by features of the processor: a model of 135 million
#: weights in float32 on one core, read from memory in every step (benchmarks/speculation/speculation.py --costs).
_READING = {
    "AVX512": {1: 1.0, 4: 1.02, 8: 1.2, 16: 1.46, 25: 2.05, 64: 4.1},
    "AVX2": {1: 1.0, 2: 1.06, 4: 1.2, 8: 1.42, 16: 1.85, 25: 2.4, 64: 4.5},
}
#: The same with weights that are not packed: one to four rows are multiplied quickly (`kernels.few_rows`), more at the
#: usual speed.
_UNPACKED = {1: 1.0, 2: 1.3, 4: 1.95, 8: 2.7, 16: 3.4, 25: 4.4}
#: The same with weights of 8 or 4 bits, whose products take nearly as long for each row.
_ROUNDED = {1: 1.0, 2: 1.16, 4: 1.35, 8: 2.0, 16: 3.3, 25: 5.0}
#: The same where products do not dominate a step's time: GPUs.
_FLAT = {1: 1.0, 16: 1.1, 64: 1.4}
#: The same for models of one to two million weights on one core.
_LIGHT = {1: 1.0, 2: 1.07, 9: 1.1, 17: 1.18, 25: 1.28, 33: 1.37, 49: 1.55, 64: 1.7}
#: A model with fewer weights spends a step on everything but its products.
_SMALL = 20_000_000


def usual_costs(
    num_weights: int, processor: str | None, weights: Literal["packed", "plain", "rounded"] = "packed"
) -> Mapping[int, float]:
    """Returns measured costs of steps: number of tokens -> time relative to one token.

    Args:
        num_weights: the model's size.
        processor: the instruction set as torch names it, such as "AVX2"; None is a GPU.
        weights: how linear layers have them: packed for few rows, as they are, or in 8 or 4 bits.

    >>> usual_costs(1_000_000, "AVX2")[64]
    1.7
    """
    if processor is None:
        return _FLAT
    if num_weights < _SMALL:
        return _LIGHT
    if weights != "packed":
        return _UNPACKED if weights == "plain" else _ROUNDED
    return _READING.get(processor, _READING["AVX2"])


def costs_by_tokens(known: Mapping[int, float]) -> tuple[float, ...]:
    """Returns the costs of steps over 1, 2, ... tokens, interpolated linearly between known ones.

    Args:
        known: number of tokens -> cost; with the cost of 1 token and of at least the largest step.

    Raises:
        ArgumentError: there is no cost of 1 token, or a cost is not above 0.

    >>> costs_by_tokens({1: 1.0, 3: 2.0})
    (1.0, 1.5, 2.0)
    """
    places = sorted(known)
    if not places or places[0] != 1 or min(known.values()) <= 0:
        raise ArgumentError(f"costs of steps are numbers above 0, that of 1 token among them; found {dict(known)}")
    costs = [known[1]]
    for low, high in itertools.pairwise(places):
        slope = (known[high] - known[low]) / (high - low)
        costs += [known[low] + slope * (place - low) for place in range(low + 1, high + 1)]
    return tuple(costs)
