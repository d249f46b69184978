"""Runs on every rank: pipelines and models with `StepCache`, to be compared between numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from partsong import CfgParallel, DataParallel, Ring, StepCache, Ulysses
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, parallelize
from tests.parallel.pipelines import PIPES
from tests.parallel.ranks import gathered

STEPS = 8
#: Between the changes that the tiny models' first blocks make, so that some steps are left out and some are not.
CACHES = {
    name: StepCache(threshold=threshold, warmup_steps=1, max_skips=2)
    for name, threshold in (("Wan", 0.27), ("Flux", 1.05), ("SD3", 1.2), ("PixArt", 0.83))
}


@dataclass
class Made:
    """Of one generation."""

    output: Tensor
    computed: int
    skipped: int


def made(name: str, strategies: tuple[Strategy, ...], mesh: Mesh, batch: int = 1) -> Made:
    """One generation of a tiny pipeline in float64."""
    pipe = PIPES[name].make()
    with parallelize(pipe, *strategies, CACHES[name], mesh=mesh) as plan:
        output = PIPES[name].call(pipe, batch, num_inference_steps=STEPS)
        cache = plan.denoisers[0].attachments[0]
        return Made(output, cache.computed, cache.skipped)


def counted(mesh: Mesh) -> tuple[list[int], list[int]]:
    """Bytes sent in a generation in which nothing is left out although all is compared, and those predicted."""
    pipe = PIPES["SD3"].make()
    with parallelize(pipe, Ulysses(), StepCache(threshold=1e-12, warmup_steps=2), mesh=mesh) as plan:
        with Ledger(flops=False) as ledger:
            PIPES["SD3"].call(pipe, num_inference_steps=STEPS)
        return gathered(int(ledger.summary()["bytes_sent"])), plan.explain().bytes_total()


def alone(name: str, batch: int = 1) -> Made:
    """On one rank."""
    with Mesh() as mesh:
        return made(name, (), mesh, batch)


def ranks(nproc: int) -> dict[str, Any]:
    """Everything, on two or four ranks."""
    found: dict[Any, Any] = {}
    with Mesh(ulysses=nproc) as mesh:
        found["Wan", 1] = made("Wan", (Ulysses(),), mesh)
        found["counted"] = counted(mesh)
    with Mesh(ring=nproc) as mesh:
        found["Flux", 1] = made("Flux", (Ring(),), mesh)
    with Mesh(cfg=2, ulysses=nproc // 2) as mesh:
        found["Wan", 1, "cfg"] = made("Wan", (CfgParallel(), Ulysses()), mesh)
        found["SD3", 2] = made("SD3", (CfgParallel(), Ulysses()), mesh, batch=2)
    with Mesh(data=nproc) as mesh:
        found["PixArt", 4] = made("PixArt", (DataParallel(),), mesh, batch=4)
    return found
