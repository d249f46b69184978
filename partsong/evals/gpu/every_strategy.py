"""The stage `strategies`: tiny pipelines under every strategy on several ranks, against the same pipeline alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partsong.errors import PartsongError, UnsupportedError
from partsong.evals.gpu.compared import distance
from partsong.evals.gpu.findings import Equipment, Finding, at_most, holds, skipped
from partsong.evals.gpu.tiny_pipelines import TINY, TinyPipeline
from partsong.parallel import Mesh, Strategy, launch, mesh_for, parallelize
from partsong.parallel.adapters import adapter_for
from partsong.parallel.ranks.collectives import agree
from partsong.samplers import generate
from partsong.samplers.registry import (
    CfgParallel,
    CrossAttentionCache,
    DataParallel,
    DisplacedPatch,
    DraftedSteps,
    LaggedLayers,
    OffloadWeights,
    ParallelVae,
    PartialPatch,
    PatchPipeline,
    Ring,
    ShardedWeights,
    StepCache,
    SyncPatch,
    TensorParallel,
    TimeParallel,
    TokenRing,
    Ulysses,
    Usp,
)

__all__ = ["MIXES", "every_strategy"]

STEPS = 3
#: Each strategy as it has to give what one rank gives; those that approximate are in their warm-up all the time.
MIXES: dict[str, tuple[Strategy, ...]] = {
    "CfgParallel": (CfgParallel(degree=2), Ulysses()),
    "DataParallel": (DataParallel(degree=2), Ulysses()),
    "Ulysses": (Ulysses(),),
    "Ulysses, one wave": (Ulysses(waves=1),),
    "Ring": (Ring(),),
    "Usp": (Usp(),),
    "TokenRing": (TokenRing(),),
    "SyncPatch": (SyncPatch(),),
    "DisplacedPatch": (DisplacedPatch(warmup_steps=STEPS),),
    "PartialPatch": (PartialPatch(warmup_steps=STEPS),),
    "TensorParallel": (TensorParallel(),),
    "ShardedWeights": (Ulysses(), ShardedWeights()),
    "OffloadWeights": (Ulysses(), OffloadWeights(resident=0.3, chunk_mb=0.01)),
    "LaggedLayers": (LaggedLayers(warmup_steps=STEPS),),
    "PatchPipeline": (PatchPipeline(warmup_steps=STEPS),),
    "TimeParallel": (TimeParallel(tolerance=0.0),),
    "DraftedSteps": (DraftedSteps(warmup_steps=STEPS),),
    "ParallelVae": (Ulysses(), ParallelVae()),
    "StepCache": (Ulysses(), StepCache(threshold=0.0)),
    "CrossAttentionCache": (Ulysses(), CrossAttentionCache()),
}
#: Largest difference from one rank, by type: sums come in another order, and bfloat16 rounds what that changes.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 6e-2}


def every_strategy(equipment: Equipment) -> Iterator[Finding]:
    """Launches ranks for each pipeline, type and number of ranks; where GPUs are too few, ranks share them."""
    for nproc in equipment.pick((2, 4), (2,)):
        for dtype in equipment.pick((torch.float32, torch.bfloat16), (torch.float32,)):
            for name in TINY:
                try:
                    yield from launch(_on_ranks, nproc, name, dtype, equipment.device, tuple(MIXES))
                except PartsongError as error:
                    yield holds(f"{name} on {nproc} ranks", False, f"{type(error).__name__}: {error}", "no error")


@torch.no_grad()
def _on_ranks(name: str, dtype: torch.dtype, device: str, labels: Sequence[str]) -> list[Finding]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    findings, row = list[Finding](), TINY[name]
    with Mesh(
        data=int(os.environ["WORLD_SIZE"]), device=device
    ) as world:  # keeps the ranks connected from one mesh to the next
        pipe = row.make(world.device, dtype)
        backend = dist.get_backend()
        for label in labels:
            check = f"{label}, {name} {str(dtype).removeprefix('torch.')}, {world.world_size} ranks by {backend}"
            findings.append(_compared(check, pipe, row, MIXES[label], world, dtype))
    return findings


def _compared(
    check: str, pipe: Any, row: TinyPipeline, mix: tuple[Strategy, ...], world: Mesh, dtype: torch.dtype
) -> Finding:
    model = adapter_for(getattr(pipe, row.denoiser))
    if (reason := next((why for strategy in mix if (why := strategy.refuses(model))), None)) is not None:
        return skipped(check, reason)
    more: dict[str, Any] = {"output_type": "pt"} if any(isinstance(each, ParallelVae) for each in mix) else {}

    def arguments() -> dict[str, Any]:
        return row.call(world.device, dtype, samples=2, steps=STEPS) | more

    want = _tensor(pipe(**arguments()))
    try:
        mesh = Mesh(**mesh_for(mix, world.world_size), device=world.device.type)
        with mesh, parallelize(pipe, *mix, mesh=mesh) as plan:
            got = _tensor(generate(plan, **arguments()))
    except PartsongError as error:
        if isinstance(error, UnsupportedError) and dtype is torch.bfloat16:
            return skipped(check, f"refused in this type: {error}")  # a loop may need finer numbers than it was given
        return holds(check, False, f"{type(error).__name__}: {error}", "no error")
    apart = agree(world.axis("data"), [distance([got], [want])])
    return at_most(check, max(value[0] for value in apart), BOUNDS[dtype])


def _tensor(output: Any) -> Tensor:
    value = next(iter(output.values()))
    return value if isinstance(value, Tensor) else torch.as_tensor(value)
