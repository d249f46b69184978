"""Plans in which order the tokens of a picture are decided, and how many at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from partsong.errors import ArgumentError
from partsong.seeds import derive

__all__ = ["apart_order", "group_sizes", "random_order", "raster_order"]


def group_sizes(num: int, steps: int) -> list[int]:
    """Divides tokens into growing groups: the later a group, the more is known that determines its tokens.

    Args:
        num: tokens.
        steps: groups.

    Returns:
        The groups' sizes, which add up to `num`. They follow a quarter of a cosine, with at least one token each; the
        last groups are reduced to keep the sum.

    Raises:
        ArgumentError: there are more groups than tokens, or none.

    Source: arXiv 2507.01957.

    >>> group_sizes(64, 12)
    [1, 2, 3, 4, 5, 6, 6, 7, 8, 8, 7, 7]
    >>> group_sizes(4, 4)
    [1, 1, 1, 1]
    """
    if not 1 <= steps <= num:
        raise ArgumentError(f"{steps} steps for {num} tokens; use 1 to {num}")
    level = [math.cos(math.pi * i / (2 * steps)) for i in range(steps + 1)]
    sizes = [max(1, round(num * (level[i] - level[i + 1]))) for i in range(steps)]
    group = steps - 1
    while (over := sum(sizes) - num) != 0:
        if over < 0 or sizes[group] > 1:
            sizes[group] -= 1 if over > 0 else -1
        group = (group - 1) % steps
    return sizes


#: Tokens this near to one another (in rows and in columns) do not share a group, where others are left.
_APART = 2


def apart_order(grid: int, sizes: Sequence[int], seed: int) -> NDArray[np.int64]:
    """Orders the tokens of a picture so that each has known neighbours, and those of a group lie apart.

    A token depends mostly on its neighbours. So a group takes tokens with known neighbours (preferring more and nearer
    ones) that are not close to one another, and fills up with tokens as far from the rest of the group as possible.

    Args:
        grid: tokens along a side.
        sizes: sizes of the groups.
        seed: of the first token, and of the choice between equally good tokens.

    Returns:
        int64 `[grid * grid]`, places row after row, in the order of their groups.

    Raises:
        ArgumentError: the sizes do not add up to the tokens.

    Source: locality-aware parallel decoding, arXiv 2507.01957.
    """
    num = grid**2
    if sum(sizes) != num:
        raise ArgumentError(f"groups of {sum(sizes)} tokens in all, but the picture has {num}")
    draw = np.random.Generator(np.random.Philox(derive(seed, "order")))
    rows, columns = np.divmod(np.arange(num), grid)
    far = np.maximum(abs(rows[:, None] - rows), abs(columns[:, None] - columns))
    distance = np.hypot(rows[:, None] - rows, columns[:, None] - columns)
    near = np.where(far == 1, 1 / np.maximum(distance, 1), 0.0)
    order: list[int] = []
    for size in sizes:
        left = np.setdiff1d(np.arange(num), order)
        # The shuffle breaks ties: the sort that follows is stable.
        left = draw.permutation(left)
        known = near[left][:, order].sum(axis=1)
        group: list[int] = []
        for token in left[np.argsort(-known, kind="stable")][: int((known >= 1).sum())]:
            if len(group) < size and (far[token, group] > _APART).all():
                group.append(int(token))
        while len(group) < size:
            rest = left[~np.isin(left, group)]
            others = group or order
            group.append(int(rest[0] if not others else rest[np.argmax(distance[rest][:, others].min(axis=1))]))
        order += group
    return np.asarray(order, dtype=np.int64)


def random_order(grid: int, seed: int) -> NDArray[np.int64]:
    """Orders the tokens of a picture randomly: int64 `[grid * grid]`."""
    draw = np.random.Generator(np.random.Philox(derive(seed, "order")))
    return draw.permutation(grid**2).astype(np.int64)


def raster_order(grid: int) -> NDArray[np.int64]:
    """Orders the tokens of a picture row after row: int64 `[grid * grid]`."""
    return np.arange(grid**2, dtype=np.int64)
