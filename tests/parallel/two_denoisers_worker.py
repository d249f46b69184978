"""Runs on two ranks: Wan 2.2's form, two transformers of which the second takes over at a boundary in time."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from diffusers import UniPCMultistepScheduler, WanPipeline

from partsong import CfgParallel, DataParallel, DisplacedPatch, Ring, Ulysses
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from tests.parallel.pipelines import PIPES
from tests.parallel.ranks import error, gathered, staying_connected

STEPS = 5
BOUNDARY = 0.8

STRATEGIES: dict[str, Strategy] = {
    "Ulysses": Ulysses(),
    "Ring": Ring(),
    "CfgParallel": CfgParallel(),
    "DataParallel": DataParallel(),
}
#: Boundaries, for `DisplacedPatch`: both transformers are called, one of them is left out, or the second has one step.
BOUNDARIES = {"both": BOUNDARY, "first only": 0.0, "second only": 1.1, "last step only": 0.5}
#: Order of the forecast and boundary, for a warm-up that ends before the second transformer is called.
STALE = {"stale": (0, BOUNDARY), "forecast": (1, BOUNDARY), "fresh in the last step": (1, BOUNDARIES["last step only"])}


def pipeline(boundary: float = BOUNDARY) -> WanPipeline:
    """A tiny pipeline whose transformers differ in their weights."""
    first = PIPES["Wan"].make()
    second = PIPES["Wan"].make().transformer
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(-0.7)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipe = WanPipeline(None, None, first.vae, scheduler, first.transformer, second, boundary_ratio=boundary)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def calls(pipe: WanPipeline, **more: Any) -> tuple[torch.Tensor, list[int]]:
    """A film, and how often each transformer was called for it."""
    counts = [0, 0]
    handles = []
    for index, module in enumerate((pipe.transformer, pipe.transformer_2)):
        assert module is not None

        def count(*_: Any, index: int = index) -> None:
            counts[index] += 1

        handles.append(module.register_forward_pre_hook(count))
    film = PIPES["Wan"].call(pipe, num_inference_steps=STEPS, guidance_scale_2=4.0, **more)
    for handle in handles:
        handle.remove()
    return film, counts


def carried(pipe: WanPipeline) -> dict[str, list[str]]:
    """The names every module, the scheduler and the pipeline carry; a registry diffusers leaves itself aside."""
    held: dict[str, Any] = {"pipe": pipe, "scheduler": pipe.scheduler}
    for part in ("transformer", "transformer_2", "vae"):
        held |= {f"{part}.{name}": child for name, child in getattr(pipe, part).named_modules()}
    return {name: sorted(vars(thing).keys() - {"_diffusers_hook"}) for name, thing in held.items()}


def _exact(strategy: Strategy, mesh: Mesh, boundary: float) -> dict[str, Any]:
    pipe = pipeline(boundary)
    batch = 3 if isinstance(strategy, DataParallel) else 1
    want, serial_calls = calls(pipe, batch=batch)
    before = carried(pipe)
    with parallelize(pipe, strategy, mesh=mesh) as plan:
        first = calls(pipe, batch=batch, size=(64, 64))[0] if boundary == BOUNDARY else want
        with Ledger(flops=False) as ledger:
            got, _ = calls(pipe, batch=batch)
            predicted = plan.explain().bytes_total()
    after, _ = calls(pipe, batch=batch)
    return {
        "error": error(got, want),
        "calls": serial_calls,
        "sent": int(ledger.summary()["bytes_sent"]),
        "predicted": predicted[mesh.rank],
        "restored": torch.equal(after, want) and carried(pipe) == before,
        "finite": bool(first.isfinite().all()),
    }


def _stale(order: int, mesh: Mesh, boundary: float) -> dict[str, Any]:
    pipe = pipeline(boundary)
    want, _ = calls(pipe)
    with (
        parallelize(pipe, DisplacedPatch(warmup_steps=1, order=order), mesh=mesh) as plan,
        Ledger(flops=False) as ledger,
    ):
        got, _ = calls(pipe)
        predicted = plan.explain().bytes_total()
    sent = int(ledger.summary()["bytes_sent"])
    return {"error": error(got, want), "sent": sent, "predicted": predicted[mesh.rank]}


@staying_connected
def run(names: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    results = {}
    for name, strategy in ((name, STRATEGIES[name]) for name in names):
        with Mesh(**mesh_for([strategy], 2)) as mesh:
            results[name] = gathered(_exact(strategy, mesh, BOUNDARY))
    with Mesh(patch=2) as mesh:
        for name, boundary in BOUNDARIES.items():
            results[name] = gathered(_exact(DisplacedPatch(warmup_steps=STEPS), mesh, boundary))
        for name, (order, boundary) in STALE.items():
            results[name] = gathered(_stale(order, mesh, boundary))
    return results
