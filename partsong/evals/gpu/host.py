"""The stage `host`: what an attention over ranks costs the host, and that no step in the middle makes it wait."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from partsong.errors import PartsongError
from partsong.evals.gpu.every_strategy import MIXES
from partsong.evals.gpu.findings import Equipment, Finding, at_most, holds, skipped, stated
from partsong.evals.gpu.host_cost import measured
from partsong.evals.gpu.mirrored import mirrored
from partsong.evals.gpu.tiny_pipelines import TINY
from partsong.parallel import Strategy, parallelize
from partsong.parallel.adapters import adapter_for
from partsong.samplers.registry import DisplacedPatch, LaggedLayers, PartialPatch, Ring, StepCache, Ulysses

__all__ = ["host"]

#: Microseconds of the host for an attention at two ranks; a fast GPU computes one of Flux in about three times that.
MOST = 150.0
#: Steps that run, of which the last half may not make the host wait.
STEPS = 6
#: Mixes past their warm-up, and as messages are compressed.
STEADY: dict[str, tuple[Strategy, ...]] = {
    **{name: mix for name, mix in MIXES.items() if not any(each.has_loop for each in mix) and name != "ParallelVae"},
    "DisplacedPatch": (DisplacedPatch(warmup_steps=1),),
    "PartialPatch": (PartialPatch(warmup_steps=1),),
    "LaggedLayers": (LaggedLayers(warmup_steps=1),),
    "StepCache": (Ulysses(), StepCache(threshold=0.0, decide="late")),
    **{f"Ring, {wire}": (Ring(wire=wire),) for wire in ("int8", "4bit")},
    **{f"DisplacedPatch, {wire}": (DisplacedPatch(warmup_steps=1, wire=wire),) for wire in ("int8", "1bit")},
}


def host(equipment: Equipment) -> Iterator[Finding]:
    """Measures the cost of attentions, then lets every strategy's steps run with each wait as an error."""
    for row in measured(equipment.pick((2, 4, 8), (2,))):
        check = f"microseconds of the host for an attention, {row['name']} at {row['ranks']} ranks"
        yield at_most(check, row["microseconds"], MOST if equipment.gpus and row["ranks"] == 2 else None)
        yield stated(f"kernels beside an attention, {row['name']} at {row['ranks']} ranks", row["launches"])
    for name in TINY:
        yield from _steps_of(name, equipment)


@torch.no_grad()
def _steps_of(name: str, equipment: Equipment) -> Iterator[Finding]:
    row = TINY[name]
    pipe = row.make(equipment.device, torch.float32)
    model = getattr(pipe, row.denoiser)
    args, named = _call_of(pipe, model, row.call(equipment.device, torch.float32, samples=2))
    alone = _wait_in(model, args, named, equipment)
    yield stated(f"{name} alone waits", alone or "never")
    for label, mix in STEADY.items():
        check = f"{label}, {name}: steps whose host waits"
        if (reason := next((why for each in mix if (why := each.refuses(adapter_for(model)))), None)) is not None:
            yield skipped(check, reason)
            continue
        try:
            with mirrored(2, mix, equipment.device) as mesh, parallelize(model, *mix, mesh=mesh):
                place = _wait_in(model, args, named, equipment)
        except PartsongError as error:
            place = str(error)
        if equipment.gpus:
            yield holds(check, place in ("", alone), place or "none", "none")
        else:
            yield holds(f"{label}, {name}: steps run in a mirrored world", not place, place or "ran", "ran")


def _call_of(pipe: Any, model: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the arguments of the last call that a pipeline makes of its denoiser."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    hook = model.register_forward_pre_hook(lambda module, *call: calls.append(call), with_kwargs=True)
    try:
        pipe(**arguments)
    finally:
        hook.remove()
    return calls[-1]


def _wait_in(model: Any, args: Any, named: dict[str, Any], equipment: Equipment) -> str:
    """Runs steps and returns where the host of a GPU waited in their last half; empty for nowhere."""
    time: Any = named["timestep"] if "timestep" in named else args[1]
    times = [time * (1.0 - 0.05 * step) for step in range(STEPS)]
    try:
        for step, moment in enumerate(times):
            call = {**named, "timestep": moment} if "timestep" in named else named
            given = args if "timestep" in named else (args[0], moment, *args[2:])
            with _no_waiting() if equipment.gpus and step >= STEPS // 2 else nullcontext():
                model(*given, **call)
    except RuntimeError as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
        return f"{frames[-1].name}: {str(error).splitlines()[0]}"
    return ""


@contextmanager
def _no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
