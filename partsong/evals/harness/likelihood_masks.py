"""Chooses tokens to mask for the estimate of a masked model's bound, and computes the error of the estimate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from partsong import seeds

__all__ = ["Draw", "mask_draws", "variance_of"]

#: The tokens that are masked, and the weight of their mean log-probability in the estimate.
Draw = tuple[tuple[int, ...], float]


def mask_draws(count: int, num_pairs: int, masks: str, seed: int) -> list[list[Draw]]:
    """Returns groups of masks of `count` tokens; the estimate is the sum of weight times t over all of them.

    The first group is computed instead of drawn. Each of the others is an independent estimate of the same number.
    """
    if masks == "independent":
        return [[], *_independent(count, 2 * num_pairs, seed)]
    everything = (tuple(range(count)), 1.0)
    if count == 1:
        return [[everything]]
    if 2 ** (count - 1) - 1 <= num_pairs:
        subsets = (s for size in range(1, count) for s in itertools.combinations(range(count), size))
        return [[everything, *((s, 1.0 / math.comb(count, len(s))) for s in subsets)]]
    return [[everything], *_pairs(count, num_pairs, seed)]


def _pairs(count: int, num_pairs: int, seed: int) -> Iterator[list[Draw]]:
    """Draws complementary masks; each pair belongs to a stratum of the smaller mask's size.

    The sum of t over the sizes 1 ... count - 1 is half the sum of t(S) + t(complement) over S of all these sizes.
    """
    sizes = sorted(range(1, count), key=lambda size: (min(size, count - size), size))
    weight = (count - 1) / (2 * num_pairs)
    for number, order, shift in _orders(count, num_pairs, seed):
        size = sizes[int((number + shift) / num_pairs * len(sizes))]
        yield [(tuple(sorted(order[:size])), weight), (tuple(sorted(order[size:])), weight)]


def _independent(count: int, num_masks: int, seed: int) -> Iterator[list[Draw]]:
    for number, order, shift in _orders(count, num_masks, seed):
        size = 1 + int((number + shift) / num_masks * count)
        yield [(tuple(sorted(order[:size])), count / num_masks)]


def _orders(count: int, num: int, seed: int) -> Iterator[tuple[int, list[int], float]]:
    """Yields for each draw its number, a random order of the places, and a uniform number below 1."""
    noise = seeds.uniform(seed, (num, count + 1), dtype=torch.float64)
    for number, row in enumerate(noise):
        yield number, row[1:].argsort().tolist(), float(row[0])


def variance_of(drawn: Sequence[float]) -> float:
    """Estimates the variance of a sum of draws from neighbouring strata, which are compared in pairs.

    If their number is odd, the last three are compared together. Differences between strata make the estimate too large
    rather than too small.
    """
    if len(drawn) < 2:
        return math.nan if drawn else 0.0
    edges = [*range(0, len(drawn) - 1, 2)]
    variance = 0.0
    for low in edges:
        few = drawn[low:] if low == edges[-1] else drawn[low : low + 2]
        mean = sum(few) / len(few)
        variance += len(few) / (len(few) - 1) * sum((value - mean) ** 2 for value in few)
    return variance
