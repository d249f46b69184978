"""What ranks do in the tests of shared memory."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from partsong import Mesh
from partsong.parallel.ranks.collectives import all_gather
from partsong.parallel.ranks.shared_memory import ROOM

__all__ = ["gathered"]


def gathered() -> tuple[bool, Tensor]:
    """Gathers a part of each rank that goes through memory and one that is too large for that.

    Returns:
        Whether ranks share memory, and the larger parts of all of them.
    """
    with Mesh(ulysses=int(os.environ["WORLD_SIZE"])) as mesh:
        axis = mesh.axis("ulysses")
        for size in (5, ROOM // 4):
            whole = torch.full((axis.size, size), float(axis.index))
            all_gather(axis, whole, [1] * axis.size).wait()
        return axis.shared is not None, whole.flatten()
