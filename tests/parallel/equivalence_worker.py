"""Runs on every rank: each strategy against its serial twin, and counted bytes against predicted ones."""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.utils import logging

from partsong.ledger import Ledger
from partsong.parallel import (
    CfgParallel,
    DataParallel,
    DisplacedPatch,
    Mesh,
    Ring,
    Strategy,
    Ulysses,
    Usp,
    mesh_for,
    parallelize,
)
from partsong.parallel.collectives import agree
from tests.parallel.families import FAMILIES

DTYPES = {"float64": torch.float64, "float32": torch.float32}
SIDES = (8, 6)
STEPS = (900, 500, 100)


def strategies(nproc: int) -> dict[str, tuple[Strategy, ...]]:
    """Every strategy and the compositions that fit the number of ranks."""
    cases: dict[str, tuple[Strategy, ...]] = {
        "CfgParallel": (CfgParallel(),),
        "DataParallel": (DataParallel(),),
        "Ulysses": (Ulysses(),),
        "Ring": (Ring(),),
        "Usp": (Usp(),),
        "DisplacedPatch": (DisplacedPatch(warmup_steps=len(STEPS)),),
    }
    if nproc == 3:
        cases["Ulysses x 1 wave"] = (Ulysses(waves=1),)
        cases["Ulysses x 3 waves"] = (Ulysses(waves=3),)
    if nproc == 4:
        cases["CfgParallel x Ulysses"] = (CfgParallel(), Ulysses())
        cases["CfgParallel x DataParallel"] = (CfgParallel(degree=2), DataParallel(degree=2))
        cases["DisplacedPatch x Ulysses"] = (DisplacedPatch(degree=2, warmup_steps=len(STEPS)), Ulysses(degree=2))
        cases["DataParallel x Ring"] = (DataParallel(degree=2), Ring(degree=2))
    return cases


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).double().norm() / want.double().norm()).item()


def dtypes(label: str) -> tuple[str, ...]:
    """Types to run a case in; rounding of single strategies is that of their compositions."""
    return ("float64",) if " x " in label else tuple(DTYPES)


@functools.cache
def _twin(name: str, side: int, dtype: torch.dtype) -> tuple[Any, list[dict[str, Any]], list[torch.Tensor]]:
    """A model, the calls of three steps, and what it answers on one rank."""
    family = FAMILIES[name]
    model, named = family.model(side, dtype), family.call(side, 2, dtype)
    unit = 1000 if name == "Flux" else 1
    calls = [{**named, "timestep": torch.full_like(named["timestep"], time / unit)} for time in STEPS]
    with torch.no_grad():
        return model, calls, [model(**call).sample for call in calls]


def _case(name: str, side: int, dtype: torch.dtype, chosen: tuple[Strategy, ...], mesh: Mesh) -> dict[str, Any]:
    model, calls, want = _twin(name, side, dtype)
    with torch.no_grad():
        with parallelize(model, *chosen, mesh=mesh) as plan, Ledger(flops=False) as ledger:
            got = [model(**call).sample for call in calls]
            predicted = plan.explain().bytes_total()
        after = model(**calls[0]).sample
    errors = [_error(g, w) for g, w in zip(got, want, strict=True)]
    mine = [max(errors), ledger.summary()["bytes_sent"], float(torch.equal(after, want[0]))]
    everyone = agree(mesh.axis(*mesh.degrees), mine)
    return {
        "error": max(row[0] for row in everyone),
        "counted": [int(row[1]) for row in everyone],
        "predicted": predicted,
        "restored": all(row[2] == 1.0 for row in everyone),
        "moved": not torch.equal(got[0], got[1]),
    }


def run(nproc: int) -> dict[tuple[str, str, int, str], dict[str, Any]]:
    """All cases on the ranks of this process."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = {}
    for label, chosen in strategies(nproc).items():
        with Mesh(**mesh_for(chosen, nproc)) as mesh:
            mesh.axis(*mesh.degrees)  # asked for first, all axes together must not lend their name to a single one
            for name in FAMILIES:
                for side in SIDES:
                    for dtype_name in dtypes(label):
                        dtype = DTYPES[dtype_name]
                        results[label, name, side, dtype_name] = _case(name, side, dtype, chosen, mesh)
    return results
