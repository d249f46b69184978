"""Checks, after a call has failed, that all ranks of an axis stopped at the same exchange."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from partsong.errors import DistributedError
from partsong.parallel.ranks.mesh import Axis

__all__ = ["check_stopped_alike"]

#: Seconds until a rank that has not stopped where the others did is given up.
PATIENCE = 8.0


def check_stopped_alike(axis: Axis) -> None:
    """Compares the ranks' numbers of exchanges over the store, and clears the axis' doubts where they are equal.

    The store is asked because messages between the ranks are what is in doubt.

    Raises:
        DistributedError: a rank stopped at another exchange, or went on without an error.
    """
    count, store = next(axis.calls), dist.distributed_c10d._get_default_store()
    place = f"partsong/stopped/{axis.group.group_name}/{count}"
    own = axis.ranks[axis.index]
    store.set(f"{place}/{own}", "here")
    for rank in axis.ranks:
        try:
            store.wait([f"{place}/{rank}"], timedelta(seconds=PATIENCE))
        except RuntimeError as error:
            raise DistributedError(
                f"rank {own}: a call failed here at exchange {count} on axis {axis.name}, and rank {rank} did not stop "
                "there; their messages no longer match, so open a new mesh, or start the ranks again"
            ) from error
    axis.doubts.clear()
