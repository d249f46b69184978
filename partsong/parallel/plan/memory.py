"""Says how much memory a rank needs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Memory"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Says how many bytes of a model and its calls one rank holds.

    Attributes:
        weights: bytes of the weights that stay on the rank.
        working: bytes of the tensors alive at the peak of a call, besides weights and arguments.
        kept: bytes of those that stay until the next call.
    """

    weights: int
    working: int
    kept: int
