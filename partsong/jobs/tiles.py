"""Runs a job of ``partsong image`` with a model of picture tokens, in one process."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partsong import zoo
from partsong.errors import ArgumentError
from partsong.foreign_messages import quiet_libraries
from partsong.garbage import collect_again
from partsong.jobs.compare import drift
from partsong.jobs.folder_source import FolderSource
from partsong.jobs.images import facts_read
from partsong.ledger import Ledger
from partsong.outputs import save_images
from partsong.samplers.any_order import PictureRule
from partsong.samplers.text import AnyOrderText

__all__ = ["TilesJob", "run_tiles"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TilesJob:
    """Says which images to sample.

    Attributes:
        source: the model.
        prompt: what to draw.
        rule: how tokens are decided.
        guidance: how far to go beyond the caption's own logits; None takes the model's setting.
        num_images: how many images of the prompt.
        seed: of orders and draws.
        dtype: type of weights and arithmetic.
        threads: None leaves the choice to torch.
        compare: whether to decide one token a forward too.
        out: PNG to write.
        ledger: JSONL to write.
    """

    source: FolderSource
    prompt: str
    rule: PictureRule
    guidance: float | None = None
    num_images: int = 1
    seed: int = 0
    dtype: str = "float32"
    threads: int | None = None
    compare: bool = False
    out: Path
    ledger: Path | None = None


def run_tiles(job: TilesJob) -> dict[str, Any]:
    """Samples a job and writes the images; returns the measured values by their JSON names.

    Raises:
        ArgumentError: the prompt does not follow the model's grammar, or the folder cannot be read.
    """
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    quiet_libraries()
    collect_again()
    loaded = _load(job)
    with Ledger(job.ledger) as records:
        decoded, images, seconds = _sample(loaded, job, job.rule)
        records.count(forwards=int(decoded.forwards.max()), tokens=decoded.tokens.numel(), seconds_compute=seconds)
        records.step()
    values = {
        "seconds": seconds,
        "class": job.rule.kind,
        "psnr_to_serial": None,
        "max_abs_diff": None,
        "facts_read": facts_read(job.source.zoo_name, job.prompt, images),
        "bytes_sent": [0],
        "threads": torch.get_num_threads(),
        "tokens": decoded.tokens.numel(),
        "forwards": int(decoded.forwards.max()),
        "tokens_drafted": int(decoded.drafted.sum()),
        "tokens_rejected": int(decoded.rejected.sum()),
    }
    if job.compare:
        serial_run, serial, seconds_serial = _sample(loaded, job, job.rule.serial())
        values |= drift(images, serial).as_json(seconds, seconds_serial)
        values |= {"forwards_serial": int(serial_run.forwards.max())}
        values |= {"facts_read_serial": facts_read(job.source.zoo_name, job.prompt, serial)}
    paths = save_images(list(images), job.out)
    return {**values, "out": paths[0], "images": paths}


def _load(job: TilesJob) -> Any:
    read = zoo.model("tiles").read
    assert read is not None
    try:
        return read(job.source.folder, getattr(torch, job.dtype))
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise ArgumentError(f"the model folder {job.source.folder} cannot be loaded: {error}") from error


def _sample(loaded: Any, job: TilesJob, rule: PictureRule) -> tuple[AnyOrderText, Any, float]:
    start = time.perf_counter()
    decoded = rule.decode(loaded.captioned([job.prompt] * job.num_images, job.guidance), seed=job.seed)
    images: Any = loaded.draw(decoded.tokens).astype(np.float32)
    return decoded, images, time.perf_counter() - start
