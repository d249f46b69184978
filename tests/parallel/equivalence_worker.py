"""Runs on every rank: each strategy against its serial twin, and counted bytes against predicted ones."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from diffusers.utils import logging

from partsong import (
    CfgParallel,
    DataParallel,
    DisplacedPatch,
    DynamicSequence,
    ExpertParallel,
    LaggedLayers,
    LatentParallel,
    LayerPipeline,
    OffloadWeights,
    PartialPatch,
    Ring,
    ShardedWeights,
    SyncPatch,
    TensorParallel,
    TokenRing,
    Ulysses,
    Usp,
)
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.hooks.samples import sample_of
from partsong.parallel.ranks import collectives
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.mesh import Axis
from partsong.samplers import registry
from tests.covering import taking_turns
from tests.parallel.families import FAMILIES, adapter_of
from tests.parallel.ranks import error

DTYPES = {"float64": torch.float64, "float32": torch.float32}
SIDES = (8, 6)
STEPS = (900, 100)
#: What a case is made of: number of ranks, strategies, model, type and size.
Case = tuple[int, str, str, str, int]


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
        "ExpertParallel": (ExpertParallel(),),
        "LatentParallel": (LatentParallel(overlap=1.0),),  # what its parts are is in test_latent_parallel
    }
    if nproc < 3:  # the tiny models have three heads, and some two groups of them
        cases["TensorParallel"] = (TensorParallel(),)
        cases["ShardedWeights"] = (ShardedWeights(),)
    if nproc < 3:  # the tiny models have few blocks
        cases["LaggedLayers"] = (LaggedLayers(warmup_steps=len(STEPS)),)
        cases["LayerPipeline"] = (LayerPipeline(),)
    if nproc == 1:  # it has no ranks of its own
        cases["OffloadWeights"] = (OffloadWeights(resident=0.3, chunk_mb=0.005),)
    if nproc == 3:
        cases["Ulysses x OffloadWeights"] = (Ulysses(), OffloadWeights(resident=0.3, chunk_mb=0.005))
        cases["Ulysses x 1 wave"] = (Ulysses(waves=1),)
        cases["Ulysses x 3 waves"] = (Ulysses(waves=3),)
        cases["Ulysses x ShardedWeights"] = (Ulysses(), ShardedWeights())
    if nproc == 4:
        cases["CfgParallel x Ulysses"] = (CfgParallel(), Ulysses())
        cases["CfgParallel x DataParallel"] = (CfgParallel(degree=2), DataParallel(degree=2))
        cases["DisplacedPatch x Ulysses"] = (DisplacedPatch(degree=2, warmup_steps=len(STEPS)), Ulysses(degree=2))
        cases["TokenRing x Ulysses"] = (TokenRing(degree=2), Ulysses(degree=2))
        cases["CfgParallel x DynamicSequence"] = (CfgParallel(), DynamicSequence())
        cases["CfgParallel x TensorParallel"] = (CfgParallel(), TensorParallel(degree=2))
        cases["CfgParallel x ShardedWeights"] = (CfgParallel(degree=2), Ring(degree=2), ShardedWeights())
        cases["DataParallel x Ring"] = (DataParallel(degree=2), Ring(degree=2))
    return cases


def families(chosen: tuple[Strategy, ...]) -> list[str]:
    """The families that none of the strategies refuses."""
    return [name for name in FAMILIES if not any(strategy.refuses(adapter_of(name)) for strategy in chosen)]


def product(nproc: int) -> list[Case]:
    """Every case on this number of ranks."""
    return [
        (nproc, label, name, dtype, side)
        for label, chosen in strategies(nproc).items()
        for name in families(chosen)
        for dtype in DTYPES
        for side in SIDES
    ]


#: Single strategies that do on four ranks what they cannot on three.
FOUR = ("Usp", "TokenRing", "DynamicSequence")
#: Strategies that ask the same of a model: to cut its batch, its tokens, its layers or its list of blocks.
KINDS = (
    ("CfgParallel", "DataParallel"),
    ("Ulysses", "Ring", "Usp", "TokenRing", "SyncPatch", "DisplacedPatch", "PartialPatch", "LatentParallel"),
    ("TensorParallel", "ShardedWeights", "LaggedLayers", "LayerPipeline"),
)
#: One family for each way in which tokens meet: in one stream, under masks, beside a text, after it, and in frames.
FIRST = ("DiT", "PixArt masked", "SD3", "Flux", "Wan")


def usual(nproc: int) -> list[Case]:
    """What the default run chooses from.

    The first families meet every strategy in every type and size. The others meet one strategy that cuts tokens and one
    that cuts layers on two ranks, in float64 and in one size, and those whose texts differ in length all that cut the
    batch; tests/pipelines cuts the batch of every family. On more ranks
    float64 and the odd size show what is uneven; strategies that are composed, or have waves, take turns with the first
    families, and on four, more than there are cores, single ones run only where they differ there from three.
    """
    labels, places = list(strategies(nproc)), {name: place for place, name in enumerate(FAMILIES)}
    own = {label for label in labels if " x " not in label}.difference(*KINDS)  # made for one family
    turns = taking_turns(FAMILIES, KINDS[1:])
    turns |= {(label, name) for label in KINDS[0] for name, family in FAMILIES.items() if family.ragged}

    def is_usual(label: str, name: str, dtype: str, side: int) -> bool:
        if nproc > 2 and (dtype, side) != ("float64", 6):
            return False
        if name == "Lumina2" and label == "Ulysses":  # two ranks cut through a group of heads that read the same keys
            return (nproc, dtype, side) == (2, "float64", 6)
        if nproc > 2 and name not in FIRST:
            return False
        if " x " in label:
            return FIRST[labels.index(label) % len(FIRST)] == name
        if nproc == 4:
            return label in FOUR and name == "Flux"
        is_turn = dtype == "float64" and side == SIDES[places[name] % 2] and ((label, name) in turns or label in own)
        return name in FIRST or (nproc == 2 and is_turn)

    return [case for case in product(nproc) if is_usual(*case[1:])]


def compared() -> set[tuple[str, str]]:
    """Strategies in kebab case and model classes that are compared here, one strategy at a time."""
    names = {kind: name for name, kind in registry.strategies().items()}
    single = [chosen for chosen in (strategies(1) | strategies(2)).values() if len(chosen) == 1]
    return {(names[type(chosen[0])], adapter_of(name).model) for chosen in single for name in families(chosen)}


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


def run(nproc: int, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """All these cases, which are on the ranks of this process."""
    logging.set_verbosity_error()
    results = {}
    with Mesh(data=nproc):  # keeps the ranks connected from one mesh to the next
        for label, chosen in strategies(nproc).items():
            if not (some := [case for case in cases if case[1] == label]):
                continue
            with Mesh(**mesh_for(chosen, nproc)) as mesh:
                mesh.axis(*mesh.degrees)  # asked for first, all axes together must not lend their name to a single one
                for case in some:
                    _, _, name, dtype, side = case
                    results[case] = _case(name, side, DTYPES[dtype], chosen, mesh)
    return results


def run_fused(nproc: int, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """The same through a library that moves all parts of a tensor at once, as NCCL does: gloo stands for it."""
    make_axis = Mesh._make_axis

    def fused(mesh: Mesh, names: tuple[str, ...]) -> Axis:
        axis = make_axis(mesh, names)
        return replace(axis, is_fused=axis.size > 1)

    # gloo's messages do not tell when they have arrived, unless somebody waits for them.
    with mock.patch.object(Mesh, "_make_axis", fused), mock.patch.object(collectives, "watch"):
        return run(nproc, cases)
