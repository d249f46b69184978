"""How a length is cut among ranks: contiguous runs, as even as can be, computed alike on every rank."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["offsets", "split_sizes"]


def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` contiguous runs covering `total`; the longer ones come first.

    Example:
        >>> split_sizes(7, 3)
        (3, 2, 2)
    """
    base, extra = divmod(total, parts)
    return tuple(base + (index < extra) for index in range(parts))


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each run of `sizes` begins.

    Example:
        >>> offsets((3, 2, 2))
        (0, 3, 5)
    """
    starts, start = [], 0
    for size in sizes:
        starts.append(start)
        start += size
    return tuple(starts)
