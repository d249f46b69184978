"""Runs the ranks of a group from their start to their end."""

from __future__ import annotations

import os

import torch

from partsong.errors import PartsongError
from partsong.jobs.pipelines import quiet_libraries
from partsong.parallel import Mesh
from partsong.serving.messages import JobWork
from partsong.serving.ranks.floor import Floor
from partsong.serving.ranks.front import Front
from partsong.serving.ranks.orders import share_orders
from partsong.serving.ranks.paused_job import PausedJob
from partsong.serving.ranks.served_model import ServedModel
from partsong.serving.ranks.settings import GroupSettings

__all__ = ["serve_ranks"]

#: Seconds that a rank waits for another one in an exchange.
_TIMEOUT = 600.0


def serve_ranks(settings: GroupSettings) -> None:
    """Serves one model on this rank until the server asks the group to end; `launch` calls it on every rank.

    Raises:
        PartsongError: the model cannot be loaded.
        RankError: the ranks came to different ends of a step.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    quiet_libraries()
    with Mesh(data=int(os.environ.get("WORLD_SIZE", "1")), timeout=_TIMEOUT) as mesh:
        model = ServedModel(settings, mesh)
        floor, everyone = Floor(model, mesh), mesh.axis("data")
        calls = _calls_per_step(model)
        front = Front(settings, model, mesh, floor, calls) if mesh.is_main else None
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


def _calls_per_step(model: ServedModel) -> int:
    """Makes one step, which warms the model up, and returns how often its pipeline called it; 2 where that failed."""
    arguments = {**model.defaults, "num_inference_steps": 1}
    work = JobWork(id="warm-up", prompt="a", arguments=arguments, out=())
    calls = 0
    try:
        job = PausedJob(model, work, decodes=False)
        job.begin()
        while not job.is_done:
            with torch.no_grad():
                output = model.denoiser(**job.arguments)
            calls += 1
            job.answer(output)
    except PartsongError:  # the pipeline wants more than a prompt
        return 2
    return calls


def _nothing(work: JobWork, step: int, steps: int) -> bool:
    return False
