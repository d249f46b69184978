"""Runs on every rank: models of one's own under strategies, with a row and without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from partsong import (
    CfgParallel,
    DataParallel,
    DisplacedPatch,
    LaggedLayers,
    PartialPatch,
    Ring,
    StepCache,
    SyncPatch,
    TensorParallel,
    TokenRing,
    Ulysses,
    Usp,
)
from partsong.errors import PartsongError
from partsong.ledger import Ledger
from partsong.parallel import Adapter, Mesh, Strategy, mesh_for, parallelize
from tests.parallel.own_models import MODELS, WRONG
from tests.parallel.ranks import error, gathered, staying_connected

WITH_ROW: dict[str, tuple[Strategy, ...]] = {
    "Ulysses": (Ulysses(),),
    "Ring": (Ring(),),
    "Usp": (Usp(ulysses_degree=1),),
    "TokenRing": (TokenRing(),),
    "SyncPatch": (SyncPatch(),),
    "DisplacedPatch": (DisplacedPatch(warmup_steps=9),),
    "PartialPatch": (PartialPatch(warmup_steps=9),),
    "StepCache": (StepCache(threshold=0.0), Ulysses()),
    "LaggedLayers": (LaggedLayers(warmup_steps=9),),
    "DataParallel": (DataParallel(),),
}
WITHOUT: dict[str, tuple[Strategy, ...]] = {"CfgParallel": (CfgParallel(),), "DataParallel": (DataParallel(),)}


@staying_connected
def right(nproc: int, cases: list[tuple[str, str, bool]]) -> dict[tuple[str, str, bool], list[tuple[float, bool]]]:
    """How far each model is from itself alone under a strategy, and whether its bytes are those predicted."""
    return {case: gathered(_right(nproc, *case)) for case in cases}


def _right(nproc: int, name: str, strategy: str, has_row: bool) -> tuple[float, bool]:
    own = MODELS[name]
    torch.manual_seed(3)
    model = own.build().double().eval()
    # Two steps of two samples, and one of another number of samples.
    calls, time = [own.call(2), own.call(2), own.call(3)], own.row().timestep
    calls[1][time] = calls[1][time] / 2
    strategies = (WITH_ROW if has_row else WITHOUT)[strategy]
    with torch.no_grad(), Mesh(**mesh_for(strategies, nproc)) as mesh:
        want = [_tensor(model(**named)) for named in calls]
        with parallelize(model, *strategies, mesh=mesh, adapter=own.row() if has_row else None) as plan:
            with Ledger(flops=False) as ledger:
                got = [_tensor(model(**named)) for named in calls[:2]]
                predicted = plan.explain().bytes_total()[mesh.rank]
            sent = int(ledger.summary()["bytes_sent"])
            got.append(_tensor(model(**calls[2])))
    return max(error(one, other) for one, other in zip(got, want, strict=True)), sent == predicted


@staying_connected
def wrong() -> dict[str, list[str]]:
    """What each rank is told of a row that misses something, and of a model without what a strategy needs."""
    with Mesh(ulysses=2) as mesh:
        told = {"row": gathered(_told(mesh, WRONG.build(), WRONG.row(), WRONG.call(1), Ulysses()))}
    with Mesh(ulysses=2) as mesh:
        own = MODELS["the page's"]
        told["no row"] = gathered(_told(mesh, own.build(), None, own.call(1), Ulysses()))
    with Mesh(tensor=2) as mesh:
        told["tensor"] = gathered(_told(mesh, own.build(), own.row(), own.call(1), TensorParallel()))
    return told


def _told(mesh: Mesh, model: nn.Module, row: Adapter | None, named: dict[str, Any], strategy: Strategy) -> str:
    try:
        with torch.no_grad(), parallelize(model.double().eval(), strategy, mesh=mesh, adapter=row):
            model(**named)
    except PartsongError as problem:
        return f"{type(problem).__name__}: {problem}"
    return "accepted"


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]
