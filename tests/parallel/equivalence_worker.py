"""Runs on every rank: each strategy against its serial twin, and counted bytes against predicted ones."""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.utils import logging

from partsong import (
    CfgParallel,
    DataParallel,
    DisplacedPatch,
    DynamicSequence,
    PartialPatch,
    Ring,
    SyncPatch,
    TokenRing,
    Ulysses,
    Usp,
)
from partsong.ledger import Ledger
from partsong.parallel import ADAPTERS, Adapter, Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.hooks.model_hooks import sample_of
from partsong.parallel.ranks.collectives import agree
from partsong.samplers.registry import STRATEGIES
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import error

DTYPES = {"float64": torch.float64, "float32": torch.float32}
SIDES = (8, 6)
STEPS = (900, 100)
#: Strategies whose exchanges have tests of their own, in the shapes that matter to them.
BRIEF = ("TokenRing", "TokenRing x Ulysses", "PartialPatch")


def strategies(nproc: int) -> dict[str, tuple[Strategy, ...]]:
    """Every strategy and the compositions that fit the number of ranks."""
    cases: dict[str, tuple[Strategy, ...]] = {
        "CfgParallel": (CfgParallel(),),
        "DataParallel": (DataParallel(),),
        "Ulysses": (Ulysses(),),
        "Ring": (Ring(),),
        "Usp": (Usp(),),
        "TokenRing": (TokenRing(),),
        "DynamicSequence": (DynamicSequence(),),
        "SyncPatch": (SyncPatch(),),
        "DisplacedPatch": (DisplacedPatch(warmup_steps=len(STEPS)),),
        "PartialPatch": (PartialPatch(warmup_steps=len(STEPS)),),
    }
    if nproc == 3:
        cases["Ulysses x 1 wave"] = (Ulysses(waves=1),)
        cases["Ulysses x 3 waves"] = (Ulysses(waves=3),)
    if nproc == 4:
        cases["CfgParallel x Ulysses"] = (CfgParallel(), Ulysses())
        cases["CfgParallel x DataParallel"] = (CfgParallel(degree=2), DataParallel(degree=2))
        cases["DisplacedPatch x Ulysses"] = (DisplacedPatch(degree=2, warmup_steps=len(STEPS)), Ulysses(degree=2))
        cases["TokenRing x Ulysses"] = (TokenRing(degree=2), Ulysses(degree=2))
        cases["CfgParallel x DynamicSequence"] = (CfgParallel(), DynamicSequence())
        cases["DataParallel x Ring"] = (DataParallel(degree=2), Ring(degree=2))
    return cases


def sizes(label: str, name: str, nproc: int) -> list[tuple[int, str]]:
    """Sides and types to run a case in; rounding of two ranks is that of more, and of single strategies composed."""
    if FAMILIES[name].brief and FAMILIES[name].video and label not in ("Ulysses", "Ring"):
        every = [(SIDES[1], "float64")]
    elif FAMILIES[name].brief or label in BRIEF:
        every = [(SIDES[1], "float64"), (SIDES[0], "float32")]
    else:
        every = [(SIDES[0], "float64"), (SIDES[1], "float64"), (SIDES[1], "float32")]
    return [(side, dtype) for side, dtype in every if dtype == "float64" or nproc == 2]


def families(chosen: tuple[Strategy, ...], nproc: int) -> list[str]:
    """The families to run on so many ranks that none of the strategies refuses."""
    names = [name for name, family in FAMILIES.items() if nproc in family.ranks]
    return [name for name in names if not any(strategy.refuses(_row(name)) for strategy in chosen)]


def pairs() -> set[tuple[str, str]]:
    """Strategies in kebab case and model classes that are compared here, one strategy at a time."""
    names = {kind: name for name, kind in STRATEGIES.items()}
    single = [chosen for chosen in strategies(2).values() if len(chosen) == 1]
    return {(names[type(chosen[0])], _row(name).model) for chosen in single for name in families(chosen, 2)}


@functools.cache
def _row(name: str) -> Adapter:
    return ADAPTERS[type(FAMILIES[name].build(SIDES[0])).__name__]


@functools.cache
def _twin(name: str, side: int, dtype: torch.dtype) -> tuple[Any, list[dict[str, Any]], list[torch.Tensor]]:
    """A model, the calls of two steps, and what it answers on one rank."""
    family = FAMILIES[name]
    model, named = family.model(side, dtype), family.call(side, 2, dtype)
    calls = [family.at(named, time) for time in STEPS]
    with torch.no_grad():
        return model, calls, [sample_of(model(**call)) for call in calls]


def _case(name: str, side: int, dtype: torch.dtype, chosen: tuple[Strategy, ...], mesh: Mesh) -> dict[str, Any]:
    model, calls, want = _twin(name, side, dtype)
    with torch.no_grad():
        with parallelize(model, *chosen, mesh=mesh) as plan, Ledger(flops=False) as ledger:
            got = [sample_of(model(**call)) for call in calls]
            predicted = plan.explain().bytes_total()
        after = sample_of(model(**calls[0]))
    errors = [error(g, w) for g, w in zip(got, want, strict=True)]
    rank = mesh.rank
    mine = [max(errors), ledger.summary()["bytes_sent"], float(torch.equal(after, want[0])), predicted[rank]]
    everyone = agree(mesh.axis(*mesh.degrees), mine)
    return {
        "error": max(row[0] for row in everyone),
        "counted": [int(row[1]) for row in everyone],
        # Ranks with samples of other text lengths see other token counts: each can tell its own bytes only.
        "predicted": [int(row[3]) for row in everyone] if FAMILIES[name].ragged else predicted,
        "restored": all(row[2] == 1.0 for row in everyone),
        "moved": not torch.equal(got[0], got[1]),
    }


def run(nproc: int, video: bool) -> dict[tuple[str, str, int, str], dict[str, Any]]:
    """All cases of pictures or of videos on the ranks of this process."""
    logging.set_verbosity_error()
    results = {}
    for label, chosen in strategies(nproc).items():
        with Mesh(**mesh_for(chosen, nproc)) as mesh:
            mesh.axis(*mesh.degrees)  # asked for first, all axes together must not lend their name to a single one
            for name in (name for name in families(chosen, nproc) if FAMILIES[name].video == video):
                for side, dtype in sizes(label, name, nproc):
                    results[label, name, side, dtype] = _case(name, side, DTYPES[dtype], chosen, mesh)
    return results
