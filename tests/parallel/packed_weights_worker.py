"""Runs on every rank: models with packed weights beside strategies that split, against one rank without them."""

from __future__ import annotations

from unittest import mock

import torch

from partsong import CfgParallel, DisplacedPatch, PackedWeights, SyncPatch, TensorParallel, Ulysses
from partsong.parallel import Mesh, Strategy, mesh_for, packed_weights, parallelize
from partsong.parallel.hooks.samples import sample_of
from tests.parallel.ranks import error, gathered, staying_connected
from tests.parallel.tensor_worker import build, calls
from tests.parallel.unets import UNETS

#: Approximate ones are in their warm-up all the time.
MIXES: dict[str, tuple[str, Strategy]] = {
    "SyncPatch": ("UNet", SyncPatch()),
    "DisplacedPatch": ("UNet", DisplacedPatch(warmup_steps=9)),
    "CfgParallel": ("UNet", CfgParallel()),
    "Ulysses": ("Wan", Ulysses()),
    "TensorParallel": ("Flux", TensorParallel()),
}
TIMES = (900.0, 100.0)


def model_of(name: str) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    """A tiny model in float32, and two calls."""
    if name == "UNet":
        return UNETS["SD"].model(torch.float32).eval(), UNETS["SD"].calls((16, 16), torch.float32, TIMES)
    model = build(name).to(torch.float32)
    return model, [{key: _single(value) for key, value in call.items()} for call in calls(name)]


def _single(value: torch.Tensor) -> torch.Tensor:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@staying_connected
def distances() -> dict[str, float]:
    """The largest distance from one rank of each mix."""
    found = {}
    for mix, (name, strategy) in MIXES.items():
        model, named = model_of(name)
        few = mock.patch.object(packed_weights, "_FEWEST", 1)
        with Mesh(**mesh_for((strategy,), 2)) as mesh, torch.no_grad(), few:
            want = [sample_of(model(**call)) for call in named]
            with parallelize(model, strategy, PackedWeights(), mesh=mesh):
                got = [sample_of(model(**call)) for call in named]
        own = max(error(one, other) for one, other in zip(got, want, strict=True))
        found[mix] = max(gathered(own))
    return found
