"""Started by torchrun: samples with two ranks; with an argument, that rank kills itself in mid-run."""

from __future__ import annotations

import os
import signal
import sys

import torch

from partsong import Ulysses
from partsong.parallel import Mesh, parallelize
from tests.parallel.families import FAMILIES


def main() -> None:
    victim = int(sys.argv[1]) if len(sys.argv) > 1 else None
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
    main()
