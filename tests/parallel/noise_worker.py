"""Runs on two ranks: pipelines that are given no generator, on ranks whose own generators stand elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DDIMScheduler, DDPMScheduler, EulerAncestralDiscreteScheduler

from partsong import CfgParallel, Ulysses
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, parallelize
from tests.parallel.pipelines import PIPES
from tests.parallel.ranks import error, gathered, staying_connected

SEED = 100


@dataclass(frozen=True)
class Case:
    """A pipeline, the scheduler it gets (None keeps its own), and arguments of the call."""

    pipe: str
    scheduler: type | None = None
    strategy: Strategy = field(default_factory=Ulysses)
    arguments: dict[str, Any] = field(default_factory=dict)


CASES = {
    "SD3": Case("SD3"),
    "Wan": Case("Wan"),
    "DiT": Case("DiT"),
    "DiT without guidance": Case("DiT", arguments={"guidance_scale": 1.0}),
    "DiT, noise in every step": Case("DiT", DDPMScheduler),
    # DiT hands its scheduler no generator even where it has one.
    "DiT, seeded, noise in every step": Case("DiT", DDPMScheduler, arguments={"seed": 9}),
    "PixArt, ancestral": Case("PixArt", EulerAncestralDiscreteScheduler),
    "PixArt, DDIM with eta": Case("PixArt", DDIMScheduler, CfgParallel(), {"eta": 1.0}),
}


def _case(case: Case, mesh: Mesh) -> dict[str, Any]:
    pipe_of, pipe = PIPES[case.pipe], PIPES[case.pipe].make()
    if case.scheduler is not None:
        pipe.scheduler = case.scheduler()
    call = {"seed": None, **case.arguments}
    torch.manual_seed(SEED)
    want = pipe_of.call(pipe, **call)
    torch.manual_seed(SEED + 1)
    other = pipe_of.call(pipe, **call)
    torch.manual_seed(SEED + mesh.rank)
    with parallelize(pipe, case.strategy, mesh=mesh) as plan, Ledger(flops=False) as ledger:
        got = pipe_of.call(pipe, **call)
        predicted = plan.explain().bytes_total()
    return {
        "error": error(got, want),
        "effect": error(other, want),
        "sent": int(ledger.summary()["bytes_sent"]),
        "predicted": predicted[mesh.rank],
        "sum": got.sum().item(),
    }


@staying_connected
def run() -> dict[str, list[dict[str, Any]]]:
    results = {}
    for name, case in CASES.items():
        with Mesh(**{case.strategy.axes[0]: 2}) as mesh:
            results[name] = gathered(_case(case, mesh))
    return results
