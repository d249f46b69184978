"""Runs the ranks of a replica from their start to their end."""

from __future__ import annotations

import os
from typing import Any

import torch

from partsong.errors import PartsongError
from partsong.jobs.pipelines import quiet_libraries
from partsong.parallel import Mesh
from partsong.serving.messages import JobWork
from partsong.serving.ranks.floor import Floor
from partsong.serving.ranks.forecast import forecast_for
from partsong.serving.ranks.front import Front
from partsong.serving.ranks.orders import share_orders
from partsong.serving.ranks.paused_job import PausedJob
from partsong.serving.ranks.served_model import ServedModel
from partsong.serving.ranks.settings import ReplicaSettings

__all__ = ["first_step", "serve_ranks"]

#: Seconds that a rank waits for another one in an exchange.
_TIMEOUT = 600.0


def serve_ranks(settings: ReplicaSettings) -> None:
    """Serves one model on this rank until the server asks the replica to end; `launch` calls it on every rank.

    Raises:
        PartsongError: the model cannot be loaded.
        RankError: the ranks ended a step differently.
    """
    if settings.first_device:
        os.environ["LOCAL_RANK"] = str(settings.first_device + int(os.environ["LOCAL_RANK"]))
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    quiet_libraries()
    with Mesh(data=int(os.environ.get("WORLD_SIZE", "1")), timeout=_TIMEOUT) as mesh:
        model = ServedModel(settings, mesh)
        on_one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == mesh.world_size
        floor = Floor(model, mesh, shares_files=on_one_machine and not settings.sends_files)
        everyone = mesh.on_host("data")
        calls, arguments = first_step(model)
        front = None
        if mesh.is_main:
            forecast = None if arguments is None else forecast_for(settings, model, mesh, arguments, calls)
            front = Front(settings, model, mesh, floor, calls, forecast)
        try:
            while True:
                orders = share_orders(everyone, None if front is None else front.orders())
                if orders.ends:
                    return
                report = _nothing if front is None else front.report
                outcome = floor.carry_out(orders, report)
                if front is not None:
                    front.tell(orders, outcome)
        finally:
            floor.close()
            model.close()


def first_step(model: ServedModel) -> tuple[int, dict[str, Any] | None]:
    """Makes one step to warm the model up.

    Returns:
        The number of calls of the model in the step, and the arguments of the first one; 2 and None where it failed.
    """
    defaults = {**model.defaults, "num_inference_steps": 1}
    work = JobWork(id="warm-up", prompt="a", arguments=defaults, out=())
    calls, first = 0, None
    try:
        job = PausedJob(model, work, decodes=False)
        job.begin()
        while not job.is_done:
            first = job.arguments if first is None else first
            with torch.no_grad():
                output = model.denoiser(**job.arguments)
            calls += 1
            job.answer(output)
    except PartsongError:  # the pipeline needs more than a prompt
        return 2, None
    return calls, first


def _nothing(work: JobWork, step: int, steps: int) -> bool:
    return False
