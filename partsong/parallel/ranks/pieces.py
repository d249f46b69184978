"""Names the part of a tensor that one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partsong.parallel.ranks.shards import offsets, split_sizes

__all__ = ["WeightPiece", "runs_of"]


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """Describes a part of a tensor: consecutive runs along one dim.

    Attributes:
        dim: the dim that is cut.
        runs: start and length of each run; without any, the part is as large as the tensor and zero.
    """

    dim: int
    runs: tuple[tuple[int, int], ...]

    @property
    def is_nothing(self) -> bool:
        """Says whether the rank holds no part of the tensor."""
        return bool(self.runs) and not any(length for _, length in self.runs)


def runs_of(pieces: Sequence[tuple[int, int]], parts: int, index: int) -> tuple[tuple[int, int], ...]:
    """Returns start and length of a rank's columns in every piece of a layer, whose units stay whole.

    Args:
        pieces: numbers of units, and of columns in a unit, one piece after the other.
        parts: ranks that share the units of each piece.
        index: which of them.

    >>> runs_of([(3, 8), (3, 2)], 2, 1)
    ((16, 8), (28, 2))
    """
    runs, start = list[tuple[int, int]](), 0
    for units, size in pieces:
        shares = split_sizes(units, parts)
        runs.append((start + offsets(shares)[index] * size, shares[index] * size))
        start += units * size
    return tuple(runs)
