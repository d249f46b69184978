"""Lays out parts of a latent that overlap, and blends what was computed for each of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["blend", "blend_weights", "even_starts", "ramps"]


def even_starts(length: int, part: int, count: int) -> tuple[int, ...]:
    """Returns where parts of one size begin that cover a length from end to end, as evenly spread as whole numbers are.

    Args:
        length: what is covered; at most `count` times `part`.
        part: length of a part.
        count: how many parts there are.

    Example:
        >>> even_starts(10, part=4, count=3), even_starts(4, part=4, count=1)
        ((0, 3, 6), (0,))
    """
    return tuple(round(index * (length - part) / max(1, count - 1)) for index in range(count))


def blend_weights(rows: int, before: int, after: int) -> Tensor:
    """Returns weights `[rows]` of a part: linear ramps over the rows it shares, so that all weights add up to 1.

    Args:
        rows: number of rows of the part.
        before: number of first rows that it shares with the part before.
        after: number of last rows that it shares with the part after.

    Example:
        >>> blend_weights(5, before=2, after=1).tolist()
        [0.25, 0.75, 1.0, 1.0, 0.5]
    """
    middle = torch.arange(rows, dtype=torch.float64) + 0.5
    up, down = middle / max(before, 0.5), middle.flip(0) / max(after, 0.5)
    return up.clamp(max=1) * down.clamp(max=1)


def ramps(starts: Sequence[int], size: int) -> list[Tensor]:
    """Returns the weights `[size]` of parts of one size, given where each begins."""
    shared = [max(0, before + size - after) for before, after in itertools.pairwise(starts)]
    return [blend_weights(size, before, after) for before, after in zip([0, *shared], [*shared, 0], strict=True)]


def blend(
    parts: Sequence[Tensor], places: Sequence[tuple[slice, ...]], weights: Sequence[Tensor], whole: Tensor
) -> Tensor:
    """Puts parts together in `whole`: where they overlap, a mean by their weights.

    Args:
        parts: what was computed for each part.
        places: of each part, in the last dimensions of `whole`.
        weights: of each part, with these dimensions.
        whole: is overwritten and returned; its last dimensions are covered by the places.
    """
    total = whole.new_zeros(whole.shape[whole.ndim - len(places[0]) :])
    whole.zero_()
    for part, place, weight in zip(parts, places, weights, strict=True):
        whole[(..., *place)] += part * weight
        total[place] += weight
    return whole.div_(total)
