"""Runs the ranks of a replica from their start to their end."""

from __future__ import annotations

import os

import torch

from partsong.foreign_messages import quiet_libraries
from partsong.parallel import Mesh
from partsong.serving.messages import JobWork
from partsong.serving.ranks.first_step import first_step
from partsong.serving.ranks.floor import Floor
from partsong.serving.ranks.forecast import forecast_for
from partsong.serving.ranks.front import Front
from partsong.serving.ranks.orders import share_orders
from partsong.serving.ranks.served_model import ServedModel
from partsong.serving.ranks.settings import ReplicaSettings

__all__ = ["serve_ranks"]

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
        first = first_step(model)
        front = None
        if mesh.is_main:
            forecast = None if first.arguments is None else forecast_for(settings, model, mesh, first)
            front = Front(settings, model, mesh, floor, first.calls, forecast)
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


def _nothing(work: JobWork, step: int, steps: int) -> bool:
    return False
