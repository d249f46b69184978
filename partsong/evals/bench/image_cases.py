"""Makes the cases of a timed denoiser step: serial, with strategies, and with diffusers' own parallelism."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from partsong.errors import ArgumentError
from partsong.evals.bench.models import BENCH_MODELS
from partsong.evals.bench.peers import diffusers_ring, diffusers_tensor, diffusers_ulysses
from partsong.parallel import Mesh, mesh_for, parallelize
from partsong.parallel.adapters import adapter_for
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.strategy import Strategy, combined_kind
from partsong.planner.calibration import find_calibration
from partsong.planner.choice import CLEAR
from partsong.planner.clock import replay
from partsong.planner.trace import trace_calls

__all__ = ["AUTO", "LIMIT", "BenchCase", "Mix", "cases_of", "fastest", "short_name"]

PEERS: dict[str, Callable[[nn.Module, int], None]] = {
    "diffusers Ulysses": diffusers_ulysses,
    "diffusers ring": diffusers_ring,
    "diffusers tensor parallel": diffusers_tensor,
}
AUTO = "auto"
Mix = tuple[Strategy, ...]
#: The case in which every process computes the whole serial step at the same time and nothing is exchanged.
LIMIT = "serial on every process"


@dataclass(slots=True)
class BenchCase:
    """Holds one case: its own copy of the model, and the measurements."""

    name: str
    module: nn.Module
    everyone: bool = True
    ours: bool = False
    seconds: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    sent: int = 0
    first: Tensor | None = None


def fastest(model: str, tokens: int, nproc: int) -> Mix:
    """Returns the exact mix of a model that the planner predicts to be fastest; none where one rank nearly is."""
    if (measured := find_calibration(nproc)) is None:
        raise ArgumentError(f"this machine was not measured; run `partsong calibrate --nproc {nproc}` once")
    torch.manual_seed(0)
    row = BENCH_MODELS[model]
    module, seconds = row.build().eval(), dict[Mix, float]()
    for mix in ((), *(mix for mix in row.mixes if combined_kind(mix) == "exact")):
        ranks = nproc if mix else 1
        trace = trace_calls(module, mix, ranks, row.inputs(tokens, 0.5), fused=not measured.device.host)
        seconds[mix] = replay(trace, measured.machine(ranks)).steady
    best = min(seconds, key=lambda mix: seconds[mix])
    return best if seconds[best] * CLEAR < seconds[()] else ()


def cases_of(mixes: Mapping[str, Mix], module: nn.Module, nproc: int, peers: bool, beside: Mix = ()) -> list[BenchCase]:
    """Makes a case of every mix by its name, after the serial ones, and before those of diffusers where it has them.

    Strategies in `beside` are in every case of ours and in the serial ones; they have no ranks.
    """
    alone = _alone(module, beside) if beside else module
    cases = [BenchCase("serial", alone, everyone=False), BenchCase(LIMIT, alone)]
    mixes = {name: (*mix, *beside) for name, mix in mixes.items()}
    for name, mix in mixes.items():
        label = f"{name}: {' + '.join(map(short_name, mix)) or 'serial'}" if name == AUTO else name
        if not mix:
            cases.append(BenchCase(label, module, everyone=False))
            continue
        # A copy, since replacing weights must not affect the other cases.
        copied = copy.deepcopy(module) if any(strategy.cuts_weights for strategy in mix) else _sharing_weights(module)
        parallelize(copied, *mix, mesh=Mesh(**mesh_for(mix, nproc)))
        cases.append(BenchCase(label, copied, ours=True))
    for name, enable in PEERS.items() if peers else ():
        copied = copy.deepcopy(module) if enable is diffusers_tensor else _sharing_weights(module)
        if enable is not diffusers_tensor or getattr(module, "_tp_plan", None) is not None:
            enable(copied, nproc)
            cases.append(BenchCase(name, copied))
    return cases


def _alone(module: nn.Module, beside: Mix) -> nn.Module:
    """Returns a copy of a model with strategies without ranks, and without a plan, which would ask all ranks."""
    copied = _sharing_weights(module)
    site = SimpleNamespace(module=copied, adapter=adapter_for(copied), clock=StepClock())
    for strategy in beside:
        strategy.attach(site, HookSet())  # type: ignore[arg-type]
    return copied


def short_name(strategy: Strategy) -> str:
    """Names a strategy by its type and the knobs that are not the default, except the warm-up, which is not timed."""
    knobs = (knob for knob in fields(strategy) if knob.name != "warmup_steps")
    changed = [f"{k.name}={getattr(strategy, k.name)!r}" for k in knobs if getattr(strategy, k.name) != k.default]
    return type(strategy).__name__ + (f"({', '.join(changed)})" if changed else "")


def _sharing_weights(module: nn.Module) -> nn.Module:
    """Copies a module but shares its weights, so that every case reads the same memory."""
    return copy.deepcopy(module, memo={id(p): p for p in module.parameters()})
