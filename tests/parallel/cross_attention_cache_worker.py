"""Runs on every rank: models that keep what they compute from the text, beside strategies that split."""

from __future__ import annotations

import torch

from partsong import (
    CfgParallel,
    CrossAttentionCache,
    DisplacedPatch,
    LatentParallel,
    LayerPipeline,
    OffloadWeights,
    ShardedWeights,
    StepCache,
    SyncPatch,
    TensorParallel,
    Ulysses,
)
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.hooks.samples import sample_of
from tests.parallel.ranks import gathered, staying_connected
from tests.parallel.tensor_worker import build, calls
from tests.parallel.unets import UNETS

MIXES: dict[str, tuple[Strategy, ...]] = {
    "Ulysses": (Ulysses(),),
    "CfgParallel": (CfgParallel(),),
    "DisplacedPatch": (DisplacedPatch(warmup_steps=1),),
    "LatentParallel": (LatentParallel(),),
    "LayerPipeline": (LayerPipeline(),),
    "OffloadWeights": (OffloadWeights(chunk_mb=0.01), Ulysses()),
    "ShardedWeights": (ShardedWeights(),),
    "StepCache": (StepCache(threshold=1.0, warmup_steps=1), Ulysses()),
    "SyncPatch": (SyncPatch(),),
    "TensorParallel": (TensorParallel(),),
}


@staying_connected
def differences(cases: list[tuple[str, str]]) -> list[float]:
    """How far the outputs of three steps lie apart with and without kept texts, in each case of a model and a mix."""
    rows = []
    for model, mix in cases:
        with Mesh(**mesh_for(MIXES[mix], 2)) as mesh:
            plain, kept = (_outputs(model, mesh, *MIXES[mix], *more) for more in ((), (CrossAttentionCache(),)))
        own = max((one - other).abs().max().item() for one, other in zip(plain, kept, strict=True))
        rows.append(max(gathered(own)))
    return rows


def _outputs(name: str, mesh: Mesh, *strategies: Strategy) -> list[torch.Tensor]:
    if name == "SDXL UNet":
        model, named = (
            UNETS["SDXL"].model(torch.float32),
            UNETS["SDXL"].calls((16, 16), torch.float32, (900.0, 500.0, 100.0)),
        )
    else:
        model, named = build(name), calls(name)
    with torch.no_grad(), parallelize(model.eval(), *strategies, mesh=mesh):
        return [sample_of(model(**call)) for call in named]
