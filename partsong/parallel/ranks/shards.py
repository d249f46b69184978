"""Cuts a length among ranks into contiguous runs of nearly the same size, alike on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

__all__ = ["offsets", "split_sizes"]


def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Returns the sizes of `parts` contiguous runs that cover `total`; the longer ones come first.

    Example:
        >>> split_sizes(7, 3)
        (3, 2, 2)
    """
    base, extra = divmod(total, parts)
    return tuple(base + (index < extra) for index in range(parts))


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns where each run of `sizes` begins.

    Example:
        >>> offsets((3, 2, 2))
        (0, 3, 5)
    """
    return tuple(itertools.accumulate(sizes, initial=0))[:-1]
