"""Runs on two ranks: blocks compiled before or after parallelize(), against the serial model as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.nn import functional

from partsong import Ring, Ulysses, parse_strategy
from partsong.parallel import Mesh, Strategy, capture, parallelize
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import error, gathered

#: Family, strategy, whether the blocks are compiled before parallelize(), and by what. What strategies can disturb is
#: the capture of graphs and its guards, so one case generates C++, which takes most of the time, for one block.
CASES: dict[str, tuple[str, Strategy, bool, str]] = {
    "Ulysses, compiled before": ("DiT", Ulysses(), True, "eager"),
    "Ring, compiled after": ("Flux", Ring(), False, "eager"),
    "Ulysses, compiled before to C++": ("DiT", Ulysses(), True, "inductor"),
}


def _compile(model: Any, backend: str) -> None:
    if model._repeated_blocks:
        model.compile_repeated_blocks(backend=backend)
        return
    for block in model.transformer_blocks[: 1 if backend == "inductor" else None]:
        block.compile(backend=backend)


def _case(mesh: Mesh, family: str, strategy: Strategy, before: bool, backend: str) -> dict[str, float]:
    model, named = FAMILIES[family].model(8, torch.float32), FAMILIES[family].call(8, 1, torch.float32)
    with torch.no_grad():
        want = model(**named).sample
        if before:
            _compile(model, backend)
            model(**named)  # compiled code for the unsplit model is in the cache
        with parallelize(model, strategy, mesh=mesh):
            if not before:
                _compile(model, backend)
            inside = [error(model(**named).sample, want) for _ in range(2)]
        after = error(model(**named).sample, want)
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    return {"inside": max(inside), "after": after, "compiled": float(compiled)}


def captured(mesh: Mesh, strategy: Strategy) -> dict[str, float]:
    """Captures Flux's blocks under a strategy, changes its layers under the plan, and takes it off."""
    counters.clear()
    torch._dynamo.reset()
    model, named = FAMILIES["Flux"].model(8, torch.float32), FAMILIES["Flux"].call(8, 1, torch.float32)
    operator = functional.scaled_dot_product_attention
    with torch.no_grad():
        want = model(**named).sample
        with parallelize(model, strategy, mesh=mesh) as plan:
            capture(plan, backend="eager")
            inside = [error(model(**named).sample, want) for _ in range(2)]
            calls = counters["stats"]["calls_captured"]
            model.fuse_qkv_projections()
            inside += [error(model(**named).sample, want) for _ in range(2)]
            fused = counters["stats"]["calls_captured"] - calls
        left = sum(module._compiled_call_impl is not None for module in model.modules())
        left += functional.scaled_dot_product_attention is not operator
    # Every place at which compiled code pauses is one of partsong's.
    breaks = [reason for reason in counters["graph_break"] if "torch.compiler.disable" not in reason]
    return {"inside": max(inside), "calls": calls, "fused": fused, "left": left, "breaks": len(breaks)}


def run_captured(names: list[str]) -> dict[str, list[dict[str, float]]]:
    """Captures under each strategy."""
    torch.compiler.config.force_disable_caches = True
    results = {}
    for name in names:
        strategy = parse_strategy(name)
        with Mesh(**{strategy.axes[0]: 2}) as mesh:
            results[name] = gathered(captured(mesh, strategy))
    return results


def run(labels: list[str]) -> dict[str, list[dict[str, float]]]:
    # A graph kept by an earlier run is code for the instructions of that run: torch's key does not name them, and with
    # fewer of them the same code computes NaN.
    torch.compiler.config.force_disable_caches = True
    results = {}
    for label in labels:
        family, strategy, before, backend = CASES[label]
        with Mesh(**{strategy.axes[0]: 2}) as mesh:
            results[label] = gathered(_case(mesh, family, strategy, before, backend))
    return results
