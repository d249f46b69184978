"""Names the part of a tensor that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WeightPiece"]


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """Describes a part of a tensor: consecutive runs along one dim.

    Attributes:
        dim: the dim that is cut.
        runs: start and length of each run; without any, the part is as large as the tensor and zero.
    """

    dim: int
    runs: tuple[tuple[int, int], ...]
