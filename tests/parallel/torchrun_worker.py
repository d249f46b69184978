"""Started by torchrun: two ranks meet, or sample; with the number of a rank, that one kills itself in mid-run."""

from __future__ import annotations

import os
import signal
import sys

import torch

from partsong import Ulysses
from partsong.parallel import Mesh, parallelize
from partsong.parallel.ranks.collectives import agree


def meet() -> None:
    """What torchrun has a part in: two processes are the ranks of one mesh. It needs no models, which load slowly."""
    with Mesh(ulysses=2) as mesh:
        numbers = agree(mesh.axis("ulysses"), [float(mesh.rank)])
        mesh.print(f"ranks {mesh.world_size} met {numbers == [[0.0], [1.0]]}")


def sample(victim: int) -> None:
    """Three steps of a model that two ranks share."""
    from tests.parallel.families import FAMILIES

    model, named = FAMILIES["DiT"].model(8, torch.float64), FAMILIES["DiT"].call(8, 1, torch.float64)
    with Mesh(ulysses=2) as mesh, torch.no_grad():
        want = model(**named).sample
        with parallelize(model, Ulysses(), mesh=mesh):
            for step in range(3):
                if step == 2 and mesh.rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                got = model(**named).sample
        error = ((got - want).norm() / want.norm()).item()
        mesh.print(f"ranks {mesh.world_size} right {error <= 1e-10}")


if __name__ == "__main__":
    if sys.argv[1:] == ["meet"]:
        meet()
    else:
        sample(*map(int, sys.argv[1:] or [-1]))
