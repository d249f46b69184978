"""Times steps of small models under many mixes on this machine, and predicts the same steps from its calibration."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from partsong import zoo
from partsong.evals.bench.models import BENCH_MODELS
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.load import LoadWatch
from partsong.parallel import AXES, Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.launch import launch
from partsong.planner.calibration import Calibration, calibrate
from partsong.planner.clock import replay
from partsong.planner.estimate import flags
from partsong.planner.trace import trace_calls
from partsong.samplers.registry import (
    CfgParallel,
    DisplacedPatch,
    Ring,
    ShardedWeights,
    SyncPatch,
    TensorParallel,
    TokenRing,
    Ulysses,
)

__all__ = ["MODELS", "run"]

#: Untimed steps: what approximate strategies do from the third on, they do in all later ones.
_BEFORE = 3
_MIXES: tuple[tuple[Strategy, ...], ...] = (
    (),
    (Ulysses(),),
    (Ring(),),
    (TokenRing(),),
    (SyncPatch(),),
    (DisplacedPatch(warmup_steps=1),),
    (TensorParallel(),),
    (ShardedWeights(), Ulysses()),
    (CfgParallel(),),
    (CfgParallel(degree=2), Ulysses()),
    (Ring(degree=2), Ulysses()),
)

#: Makes the arguments of a call at a time in [0, 1].
_Call = Callable[[float], dict[str, Any]]


def _flux() -> tuple[nn.Module, _Call, int]:
    row = BENCH_MODELS["flux-like"]
    return row.build(), lambda at: row.inputs(1024, at), 1


def _shapes() -> tuple[nn.Module, _Call, int]:
    pipe = zoo.load("shapes")
    config, side = pipe.transformer.config, pipe.transformer.config.sample_size
    draw = torch.Generator().manual_seed(0)
    given = {
        "hidden_states": torch.randn(2, config.in_channels, side, side, generator=draw),
        "encoder_hidden_states": torch.randn(2, 32, config.joint_attention_dim, generator=draw),
        "pooled_projections": torch.randn(2, config.pooled_projection_dim, generator=draw),
    }
    return pipe.transformer, lambda at: {**given, "timestep": torch.full((2,), 1000 * at)}, 2


MODELS: dict[str, Callable[[], tuple[nn.Module, _Call, int]]] = {"flux-like": _flux, "shapes": _shapes}


def run(nproc: int, repeats: int = 5, models: Sequence[str] = tuple(MODELS)) -> list[dict[str, Any]]:
    """Calibrates this machine with a number of ranks, times every mix on them, and predicts it.

    Args:
        nproc: ranks, one thread each.
        repeats: rounds over all mixes; the median counts.
        models: names of `MODELS`.

    Returns:
        One dict per model and mix: ``model ranks mix seconds predicted error``, and ``load_of_others``, the share of
        the cores that others took while the mixes were timed.
    """
    machine = calibrate(nproc)
    measured = launch(_timed, nproc, nproc, repeats, tuple(models))
    return [_predicted(row, machine) for row in measured]


def _predicted(row: dict[str, Any], machine: Calibration) -> dict[str, Any]:
    quiet_libraries()
    torch.manual_seed(0)
    module, call, _ = MODELS[row["model"]]()
    mix = row.pop("strategies")
    ranks = row["ranks"] if mix else 1
    trace = trace_calls(module, mix, ranks, call(0.5), fused=not machine.device.host)
    seconds = replay(trace, machine.machine(ranks)).steady
    return {**row, "predicted": seconds, "error": seconds / row["seconds"] - 1, "spread": machine.spread}


def _timed(nproc: int, repeats: int, models: tuple[str, ...]) -> list[dict[str, Any]]:
    """Times all mixes in turn; runs on every rank."""
    quiet_libraries()
    torch.set_num_threads(1)
    rows = []
    watch, used = LoadWatch(0.1), time.process_time()
    with Mesh(ulysses=nproc) as mesh, torch.inference_mode():
        for name in models:
            torch.manual_seed(0)
            module, call, branches = MODELS[name]()
            cases = {}
            for mix in _MIXES:
                has_guidance = any(isinstance(strategy, CfgParallel) for strategy in mix)
                if (has_guidance and branches == 1) or (len(mix) > 1 and mix[0].degree == 2 and nproc < 4):
                    continue
                if has_guidance and len(mix) == 1 and nproc > branches:
                    continue
                # Mixes read the same memory, but for one that puts shares in the place of weights.
                own = any(strategy.cuts_weights for strategy in mix)
                twin = copy.deepcopy(module.eval(), memo={} if own else {id(p): p for p in module.parameters()})
                if mix:
                    plan = parallelize(twin, *mix, mesh=Mesh(**mesh_for(mix, nproc)))
                    plan.clock.driven = True
                    plan.clock.begin(list(range(_BEFORE + repeats + 2, 0, -1)))
                cases[mix] = (twin, plan if mix else None)
            seconds = _rounds(cases, call, repeats, mesh)
            rows += [
                {
                    "model": name,
                    "ranks": nproc,
                    "mix": flags(mix),
                    "strategies": mix,
                    "seconds": statistics.median(times),
                    "seconds_all": times,
                }
                for mix, times in seconds.items()
            ]
        ranks = agree(mesh.axis(*AXES), [time.process_time() - used])
    load = watch.of_others(beside=sum(each[0] for each in ranks[1:]))
    return [{**row, "load_of_others": round(load, 3)} for row in rows]


def _rounds(cases: dict[Any, Any], call: _Call, repeats: int, mesh: Mesh) -> dict[Any, list[float]]:
    everyone = mesh.axis(*AXES)
    seconds: dict[Any, list[float]] = {mix: [] for mix in cases}
    for step in range(_BEFORE + repeats):
        given = call(0.9 - 0.5 * step / (_BEFORE + repeats))
        for mix, (twin, plan) in cases.items():
            agree(everyone, [0.0])
            start = time.perf_counter()
            if mix or mesh.is_main:
                twin(**given, return_dict=False)
            took = max(each[0] for each in agree(everyone, [time.perf_counter() - start]))
            if plan is not None:
                plan.clock.advance()
            if step >= _BEFORE:
                seconds[mix].append(took)
    return seconds
