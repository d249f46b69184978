"""Runs on every rank: models whose blocks' weights wait in the host's memory, beside other strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partsong import (
    CfgParallel,
    DataParallel,
    DisplacedPatch,
    OffloadWeights,
    PartialPatch,
    Ring,
    StepCache,
    SyncPatch,
    Ulysses,
    Usp,
)
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.hooks.samples import sample_of
from partsong.parallel.offload_weights.chunk_copies import ChunkCopies
from partsong.parallel.plan.neighbours import hook_of_a_user
from tests.parallel.ranks import gathered, staying_connected
from tests.parallel.tensor_worker import build, calls
from tests.parallel.unets import UNETS

#: What is beside it, on two ranks; those that approximate stay so, since they have to give the very same bits.
MIXES: dict[str, tuple[Strategy, ...]] = {
    "Ulysses": (Ulysses(),),
    "Ring": (Ring(),),
    "Usp": (Usp(ulysses_degree=1),),
    "CfgParallel": (CfgParallel(),),
    "DataParallel": (DataParallel(),),
    "DisplacedPatch": (DisplacedPatch(warmup_steps=1),),
    "PartialPatch": (PartialPatch(warmup_steps=1),),
    "StepCache": (StepCache(threshold=1.0, warmup_steps=1), Ulysses()),
    "SyncPatch": (SyncPatch(),),
}


class Watched(ChunkCopies):
    """Notes the chunks copied so far whenever an exchange is posted, and whether one is copied while one is open."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.at: list[int] = []
        self.beside, self._needed = 0, False

    def note(self, exchange: Any, on_device: bool) -> None:
        self.at.append(self.copied)
        super().note(exchange, on_device)

    def finish(self) -> None:
        self._needed = True
        super().finish()
        self._needed = False

    def _copy_here(self, number: int) -> None:
        self.beside += number * (not self._needed and any(not each.done for each in self._under_way))
        super()._copy_here(number)


def answers(name: str, dtype: torch.dtype, mesh: Mesh, *strategies: Strategy) -> tuple[list[Tensor], Any]:
    """What a model returns in three steps, and the plan's shares."""
    model, named = _of(name, dtype)
    with torch.no_grad(), parallelize(model, *strategies, mesh=mesh) as plan:
        got = [sample_of(model(**call)) for call in named]
        return got, plan.denoisers[0].shards


def _of(name: str, dtype: torch.dtype) -> tuple[Any, list[dict[str, Any]]]:
    if name == "UNet":
        return UNETS["SD"].model(dtype), UNETS["SD"].calls((16, 16), dtype, (900.0, 500.0, 100.0))
    model, named = build(name).to(dtype), calls(name)
    cast = [{key: _cast(value, dtype) for key, value in call.items()} for call in (*named, named[0])]
    return model, cast


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@staying_connected
def mixes(cases: Sequence[tuple[str, str, torch.dtype]]) -> dict[tuple[str, str, torch.dtype], list[dict[str, Any]]]:
    """Whether each mix gives the same bits with offloaded weights, and what was copied, on each rank."""
    results = {}
    for name, mix, dtype in cases:
        strategies = MIXES[mix]
        with Mesh(**mesh_for(strategies, 2)) as mesh:
            want, _ = answers(name, dtype, mesh, *strategies)
            got, shares = answers(name, dtype, mesh, OffloadWeights(resident=0.3, chunk_mb=0.005), *strategies)
            results[name, mix, dtype] = gathered(
                {
                    "same": all(map(torch.equal, got, want)),
                    "copied": shares.copied,
                    "whole": sum(block.size for block in shares.blocks),
                }
            )
    return results


def turns(nproc: int) -> list[dict[str, Any]]:
    """When chunks are copied between the exchanges of a second step."""
    from partsong.parallel.offload_weights import host_weights

    host_weights.ChunkCopies = Watched  # type: ignore[misc]
    with Mesh(ulysses=nproc) as mesh, torch.no_grad():
        model, named = _of("SD3", torch.float64)
        with parallelize(model, Ulysses(), OffloadWeights(chunk_mb=0.01), mesh=mesh) as plan:
            shares: Any = plan.denoisers[0].shards
            model(**named[0])
            assert hook_of_a_user(model) is None
            first = shares.copies.at
            shares.copies.at = []
            model(**named[1])
            return gathered({"first": first, "second": shares.copies.at, "beside": shares.copies.beside})
