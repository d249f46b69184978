"""Runs on every rank: counts what a unit costs where partsong has the loop, and in a server's turn.

A pipeline's own code runs in a thread of its own there (see `PausedCall`), which is not counted: it does what it does
without partsong.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from diffusers.utils import logging

from partsong import DualParallel, TimeParallel, TimestepPipeline
from partsong.kernels.dispatch import force_backend
from partsong.parallel import Mesh, Plan, Strategy, mesh_for, parallelize
from partsong.samplers import generate
from partsong.serving.catalog import picture_model
from partsong.serving.messages import JobWork
from partsong.serving.ranks.floor import Floor
from partsong.serving.ranks.orders import Orders, share_orders
from partsong.serving.ranks.served_model import ServedModel
from tests.gpu_ready.units import Unit, per_unit
from tests.parallel import dual_worker, timestep_worker
from tests.parallel.ranks import gathered
from tests.pipelines.cases import CASES

#: Layers of the model whose blocks `TimestepPipeline` streams, and its steps, which the ranks share.
LAYERS, STEPS = 4, 4
_SOLVED = CASES["StableDiffusionPipeline"]


def units(nproc: int) -> dict[str, list[Unit]]:
    """What a unit of each kind costs, on each rank."""
    logging.set_verbosity_error()
    found: dict[str, list[Unit]] = {}
    # No guess holds to the last bit, so each sweep settles one step.
    cases: dict[str, tuple[Callable[[], object], Strategy, Callable[[Plan, int], float]]] = {
        "TimeParallel": (_SOLVED.make, TimeParallel(window=3, tolerance=0.0), _sweeps),
        "DualParallel": (lambda: dual_worker.pipeline(layers=2), DualParallel(block_frames=2, context=1), _blocks),
        "TimestepPipeline": (timestep_worker.pipeline, TimestepPipeline(window=2), _blocks),
    }
    with Mesh(data=nproc) as mesh, force_backend("naive"):
        for name, (make, strategy, work) in cases.items():
            with Mesh(**mesh_for((strategy,), nproc)) as own, parallelize(make(), strategy, mesh=own) as plan:
                is_solved = work is _sweeps
                found[name] = gathered(per_unit(lambda length: work(plan, length), (4, 5), warm=is_solved))  # noqa: B023
        found["server"] = gathered(_served(mesh))
    return found


def _sweeps(plan: Plan, steps: int) -> float:
    """Sweeps over a generation."""
    torch.manual_seed(3)
    more = {"num_inference_steps": steps, "output_type": "latent", "generator": torch.Generator().manual_seed(9)}
    generate(plan, **{**_SOLVED.call(1), **more})
    return float(plan.clock.num_steps or 0)


def _blocks(plan: Plan, blocks: int) -> float:
    """Blocks of two latent frames, without guidance."""
    generate(plan, **dual_worker.call(4 * (2 * blocks - 1) + 1, guided=False, num_inference_steps=STEPS))
    return float(blocks)


def _served(mesh: Mesh) -> Unit:
    """What a turn of a server costs in which two jobs make a step together."""
    settings = picture_model("shapes", nproc=mesh.world_size, strategies=(), loras={}).settings
    with ExitStack() as stack:
        model = ServedModel(settings, mesh)
        stack.callback(model.close)
        floor, everyone = Floor(model, mesh, shares_files=True), mesh.on_host("data")
        assert not everyone.is_fused, "orders would go through the device"

        def turn(orders: Orders) -> None:
            given = share_orders(everyone, orders if mesh.is_main else None)
            outcome = floor.carry_out(given, lambda work, step, steps: False)
            assert not outcome.failed, outcome.failed
            for job in floor.jobs.values():  # as the first rank asks after each turn
                assert model.joined.shape(job.arguments, job.work.num) is not None

        def work(steps: int) -> float:
            arguments, strategies = {**model.defaults, "num_inference_steps": steps}, ("ulysses",)
            one, other = (
                JobWork(id=name, prompt="a red circle", arguments=arguments, out=(Path(name),), strategies=strategies)
                for name in ("one", "other")
            )
            turn(Orders(begun=(one, other), setting=(strategies, None)))
            for _ in range(steps - 1):  # the last one would decode
                turn(Orders(steps=("one", "other")))
            turn(Orders(dropped=("one", "other"), setting=((), None)))
            return float(steps - 1)

        work(2)  # what the first jobs set up stays for all others
        return per_unit(work, (4, 6), warm=False)
