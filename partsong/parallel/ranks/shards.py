"""Cuts a length into contiguous runs for ranks, as evenly as possible or by shares, alike on every rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

__all__ = ["offsets", "split_sizes"]


def split_sizes(total: int, parts: int, shares: tuple[float, ...] | None = None, least: int = 1) -> tuple[int, ...]:
    """Returns the sizes of `parts` contiguous runs that cover `total`.

    Args:
        total: what is cut.
        parts: number of runs.
        shares: how fast each part is worked on, in any unit. The time of the slowest part is as short as possible.
            Default: all equal, and the longer runs come first.
        least: the least size of a run by shares, where `total` is large enough.

    Example:
        >>> split_sizes(7, 3), split_sizes(7, 3, (1.0, 1.0, 3.0)), split_sizes(7, 2, (9.0, 1.0), least=2)
        ((3, 2, 2), (1, 1, 5), (5, 2))
    """
    if shares is None:
        base, extra = divmod(total, parts)
        return tuple(base + (index < extra) for index in range(parts))
    assert len(shares) == parts, "there is one share for each part"
    return _by_shares(total, shares, min(least, total // parts))


@functools.lru_cache(maxsize=4096)  # called by every layer in every step
def _by_shares(total: int, shares: tuple[float, ...], least: int) -> tuple[int, ...]:
    sizes, open_ones = [least] * len(shares), set(range(len(shares)))
    # A part whose share is below the least gets the least; the others share the rest.
    while True:
        rest = total - sum(sizes[index] for index in range(len(shares)) if index not in open_ones)
        whole = sum(shares[index] for index in sorted(open_ones))
        quotas = {index: int(rest * shares[index] / whole) for index in open_ones}
        small = {index for index, quota in quotas.items() if quota < least}
        if not small:
            break
        open_ones -= small
    for index, quota in quotas.items():
        sizes[index] = quota
    # Units left over by rounding down go, one by one, to the part that they delay least.
    for _ in range(total - sum(sizes)):
        sizes[min(open_ones, key=lambda index: ((sizes[index] + 1) / shares[index], index))] += 1
    return tuple(sizes)


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns where each run of `sizes` begins.

    Example:
        >>> offsets((3, 2, 2))
        (0, 3, 5)
    """
    return tuple(itertools.accumulate(sizes, initial=0))[:-1]
