"""Names the axes along which ranks are arranged, and shares work out along them where ranks are not equally fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from partsong.errors import ArgumentError
from partsong.knobs import Number

__all__ = ["AXES", "TOKEN_AXES", "check_same_shares", "check_shares", "shares_along"]

#: Outermost first: ranks of the last axis are neighbours, so the axis with the most traffic gets the fastest links.
AXES: tuple[str, ...] = (
    *("data", "time", "cfg", "expert", "pipe", "stage", "clip"),
    *("patch", "ring", "ulysses", "tensor"),
)
#: Mesh axes over which tokens are cut, outermost first.
TOKEN_AXES = ("patch", "ring", "ulysses")


def check_shares(shares: Sequence[float] | None, world_size: int) -> tuple[float, ...] | None:
    """Returns the shares of the ranks, or None where all are equal; refuses anything but a positive number for each."""
    if shares is None:
        return None
    bound = Number(0, above=True)
    if isinstance(shares, str) or not isinstance(shares, Sequence) or not all(map(bound.holds, shares)):
        raise ArgumentError(f"shares={shares!r}: use one number above 0 for each rank, such as (2, 1)")
    if len(shares) != world_size:
        raise ArgumentError(
            f"shares={tuple(shares)}: {len(shares)} given, but there are {world_size} ranks; give one for each"
        )
    return None if len(set(shares)) == 1 else tuple(map(float, shares))


def shares_along(
    names: Sequence[str], degrees: Mapping[str, int], shares: Sequence[float] | None
) -> tuple[float, ...] | None:
    """Returns the shares of the places along some axes; None where they are equal.

    All groups of a mesh are cut alike. So where ranks at one place hold the same tokens, or wait for each other, the
    slowest decides. Where tokens are cut over other axes too, a place has the sum of its ranks.

    Args:
        names: the axes, in the order of `AXES`.
        degrees: ranks on each axis of the mesh.
        shares: those of all ranks.

    Example:
        >>> degrees = dict.fromkeys(AXES, 1) | {"cfg": 2, "ulysses": 2}
        >>> shares_along(("ulysses",), degrees, (4.0, 2.0, 3.0, 1.0)), shares_along(("cfg",), degrees, (2, 2, 1, 1))
        ((3.0, 1.0), (4.0, 2.0))
    """
    if shares is None:
        return None
    grid = torch.tensor(shares, dtype=torch.float64).view(*(degrees[name] for name in AXES))
    for place, name in enumerate(AXES):
        if name not in names:
            over = grid.sum if name in TOKEN_AXES else grid.amin
            grid = over(dim=place, keepdim=True)
    along = tuple(grid.flatten().tolist())
    return None if len(set(along)) == 1 else along


def check_same_shares(shares: tuple[float, ...] | None, world_size: int) -> None:
    """Refuses shares that differ between ranks: their messages would not match."""
    if world_size == 1:
        return
    given: list[tuple[float, ...] | None] = [None] * world_size
    dist.all_gather_object(given, shares)
    for rank, theirs in enumerate(given):
        if theirs != given[0]:
            raise ArgumentError(
                f"rank {rank} was given shares={theirs}, rank 0 shares={given[0]}; make the same mesh on every rank"
            )
