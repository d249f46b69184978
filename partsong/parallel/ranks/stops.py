"""Finds out after an error whether all ranks have stopped at the same point, without a message that could be lost."""

from __future__ import annotations

import itertools
import time

import torch.distributed as dist

from partsong.parallel.ranks.health import Heartbeat
from partsong.parallel.ranks.mesh import Axis

__all__ = ["stopped_together"]

#: Seconds to wait for a rank that waits for a message itself or is gone, and for one that computes.
TIMEOUT, LONGEST = 4.0, 60.0
_STOPS = itertools.count()


def stopped_together(axis: Axis, *, ready: bool = True) -> bool:
    """Says whether all ranks have stopped after as many exchanges, so that they can exchange messages again.

    Every rank gets the same answer. A rank that failed alone gets it after a few seconds: the others never come here.

    Args:
        axis: the ranks.
        ready: whether this rank could take part in further exchanges.
    """
    if axis.size == 1:
        return ready
    # The numbers differ between ranks that have failed at different points, and then they never find each other.
    place = f"partsong/stopped/{next(_STOPS)}/{next(axis.calls)}"
    names = {rank: f"{place}/{rank}" for rank in axis.ranks}
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(names[dist.get_rank()], str(ready))
        found = _all_come(store, names) and all(store.get(name) == b"True" for name in names.values())
        # The first verdict holds for all: a rank may come just when another one gives up.
        return store.compare_set(f"{place}/verdict", "", str(found)) == b"True"
    except (RuntimeError, dist.DistStoreError):
        return False  # the store is gone with its host


def _all_come(store: dist.Store, names: dict[int, str]) -> bool:
    """Waits for all ranks while those that are missing compute; those that wait for a message will not come."""
    begin = heard = time.monotonic()
    beat = Heartbeat.current
    while missing := [rank for rank, name in names.items() if not store.check([name])]:
        now = time.monotonic()
        if beat is not None and all(map(beat.computes, missing)):
            heard = now
        if now - heard > TIMEOUT or now - begin > LONGEST:
            return False
        time.sleep(0.02)
    return True
