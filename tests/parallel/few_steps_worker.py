"""Runs on two ranks: the trained few-step model under every strategy that is exact for it."""

from __future__ import annotations

from typing import Any

import torch

from partsong import Mesh, generate, mesh_for, zoo
from partsong.parallel import parallelize
from partsong.samplers.registry import parse_strategy
from partsong.seeds import generators
from tests.parallel.ranks import error, gathered, staying_connected

MIXES = (
    *(
        "data-parallel",
        "cfg-parallel",
        "ulysses",
        "ring",
        "usp:ring_degree=2,ulysses_degree=1",
        "token-ring",
        "tensor-parallel",
    ),
    *("sharded-weights ulysses", "parallel-vae ring", "encode-once ulysses"),
)
PROMPTS = ["a red circle left of a blue square", "a large yellow triangle above a small green circle"]


@staying_connected
def run(mixes: tuple[str, ...]) -> dict[str, Any]:
    """Compares pictures of four steps with those of one process, in float64."""
    pipe = zoo.load("shapes-few", dtype=torch.float64)
    pipe.set_progress_bar_config(disable=True)
    asked = {"output_type": "pt", **zoo.MODELS["shapes-few"].defaults}
    want = pipe(prompt=PROMPTS, generator=generators(0, 2), **asked).images
    results: dict[str, Any] = {}
    for mix in mixes:
        strategies = [parse_strategy(part) for part in mix.split()]
        with Mesh(**mesh_for(strategies, 2)) as mesh, parallelize(pipe, *strategies, mesh=mesh) as plan:
            got = generate(plan, prompt=PROMPTS, generator=generators(0, 2), **asked).images
            results[mix] = gathered(error(got, want))
    return results
