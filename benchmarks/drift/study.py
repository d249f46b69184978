"""Samples a zoo model serially and with strategies over many captions, and measures facts read and drift."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from partsong import zoo
from partsong.jobs.compare import Images, gather
from partsong.ledger import Ledger
from partsong.outputs import max_abs_diff, psnr
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.ranks.launch import launch
from partsong.samplers import generate
from partsong.seeds import generators

__all__ = ["study"]


def study(
    strategies: Sequence[tuple[Strategy, ...]],
    *,
    nproc: int,
    model: str = "shapes",
    num_captions: int = 100,
    seed: int = 0,
    batch: int = 25,
) -> list[dict[str, Any]]:
    """Samples fresh captions serially and with each composition of strategies.

    Args:
        strategies: compositions to study, each over all ranks.
        nproc: ranks, one thread each.
        model: a zoo model.
        num_captions: fresh captions; image i draws its noise from the seed and i.
        seed: of captions and noise.
        batch: images of one pipeline call.

    Returns:
        A row for the serial twin, then one per composition: ``case nproc num_captions facts_read psnr_median
        psnr_min max_abs_diff seconds bytes_sent``. PSNR is in dB against the serial image, and 999 for equal ones.
        Seconds are per image, and so are bytes, of the rank that sends most.
    """
    return launch(_on_rank, nproc, tuple(strategies), model, num_captions, seed, batch)


def _on_rank(
    strategies: tuple[tuple[Strategy, ...], ...], model: str, num_captions: int, seed: int, batch: int
) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    row = zoo.MODELS[model]
    pipe = zoo.load(model)
    pipe.set_progress_bar_config(disable=True)
    captions = row.task.captions(num_captions, seed)
    world = int(os.environ["WORLD_SIZE"])
    rows, serial = [], None
    for chosen in ((), *strategies):
        degrees: dict[str, Any] = mesh_for(chosen, world) if chosen else {"data": world}
        with Mesh(**degrees, timeout=1800.0) as mesh:
            images, start = None, time.perf_counter()
            with Ledger(flops=False) as ledger:
                if chosen:
                    with parallelize(pipe, *chosen, mesh=mesh) as plan:
                        images = _sample(plan, pipe, row, captions, seed, batch)
                elif mesh.is_main:
                    images = serial = _sample(None, pipe, row, captions, seed, batch)
            seconds, sent = time.perf_counter() - start, ledger.summary().get("bytes_sent", 0)
            spent = gather(mesh, [seconds, sent], "end of a case")
            if mesh.is_main:
                used = {"seconds": max(map(itemgetter(0), spent)), "bytes_sent": max(map(itemgetter(1), spent))}
                per_image = {name: value / len(captions) for name, value in used.items()}
                rows.append(_row(chosen, mesh.world_size, row, captions, images, serial) | per_image)
    return rows


def _sample(plan: Any, pipe: Any, row: zoo.ZooModel, captions: list[str], seed: int, batch: int) -> Images:
    draws = generators(seed, len(captions))
    parts = []
    for start in range(0, len(captions), batch):
        part = slice(start, start + batch)
        arguments = {**row.defaults, "prompt": captions[part], "generator": draws[part], "output_type": "np"}
        parts.append((generate(plan, **arguments) if plan else pipe(**arguments)).images)
    return np.concatenate(parts)


def _row(
    chosen: tuple[Strategy, ...], nproc: int, row: zoo.ZooModel, captions: list[str], images: Any, serial: Any
) -> dict[str, Any]:
    facts = [row.task.facts_read(caption, image) for caption, image in zip(captions, images, strict=True)]
    drift = [min(psnr(one, other), 999.0) for one, other in zip(images, serial, strict=True)]
    return {
        "case": " x ".join(map(repr, chosen)) or "serial",
        "nproc": nproc if chosen else 1,
        "num_captions": len(captions),
        "facts_read": statistics.fmean(facts),
        "psnr_median": statistics.median(drift),
        "psnr_min": min(drift),
        "max_abs_diff": max_abs_diff(images, serial),
    }
