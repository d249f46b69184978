"""Measures pictures of several times the training size on some ranks: ``python benchmarks/image/high_resolution.py``.

Each caption is painted by the plain pipeline, by an exact strategy and by `StructureGuidance`, on every number of
ranks. The result has a sheet of the first caption's pictures beside it.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image

from benchmarks.filing import file_result, markdown_table, result_path
from partsong import ParallelVae, StructureGuidance, SyncPatch, Ulysses, zoo
from partsong.evals.pictures.seams import seams
from partsong.evals.pictures.sheet import Panel, Row, Tile, draw_sheet
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.compare import gather
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.ranks.launch import launch
from partsong.samplers import generate
from partsong.seeds import generators

TITLE = "Pictures of several times the training size"
#: An exact strategy for each model, which paints the plain pipeline's picture.
EXACT: dict[str, Strategy] = {"shapes": Ulysses(), "shapes-unet": SyncPatch()}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to paint."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    models: list[str] = field(default_factory=lambda: list(EXACT))
    """Models of the zoo."""
    factors: list[int] = field(default_factory=lambda: [2, 4])
    """How many times the training size."""
    nproc: list[int] = field(default_factory=lambda: [1, 2, 4])
    """Numbers of ranks, one thread each."""
    captions: int = 5
    """How many fresh captions, with one picture each."""
    steps: int = 28
    """Denoising steps."""
    guidance: float = 2.5
    """Guidance scale."""
    seed: int = 1
    """Seed of captions and noise."""


def main(config: Config) -> None:
    """Runs the study and writes the files."""
    note = (
        f"{config.steps} steps, guidance {config.guidance}, {config.captions} captions, float32, one thread per rank. "
        "Facts are read at the training size. Seams: how much more neighbouring pixels differ where training sizes "
        "meet than elsewhere. Seconds are medians per picture with decoding, bytes those of the rank that sends most."
    )
    rows: list[dict[str, Any]] = []
    panels: list[Panel] = []
    for model in config.models:
        for factor in config.factors:
            shown: list[Tile | None] = []
            for nproc in config.nproc:
                measured, tiles = launch(_on_rank, nproc, config, model, factor)
                rows, shown = rows + measured, shown + tiles
                # Factors take minutes, so the rows so far are written after each.
                file_result(config.out, __file__, rows, TITLE, note, _table(rows))
            caption = zoo.MODELS[model].task.captions(1, config.seed)[0]
            panels.append(Panel(title=f"{model}, {factor} times its size: {caption}", rows=[Row(tiles=shown)]))
            draw_sheet(TITLE, panels).save(config.out.with_suffix(".png"))


def _on_rank(config: Config, model: str, factor: int) -> tuple[list[dict[str, Any]], list[Tile]]:
    """Paints with each method that so many ranks can run; the results are those of the first rank."""
    quiet_libraries()
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    methods: list[tuple[Strategy, ...]] = [(StructureGuidance(), ParallelVae())]
    methods.insert(0, () if world == 1 else (EXACT[model], ParallelVae()))
    rows, tiles = list[dict[str, Any]](), list[Tile]()
    for strategies in methods:
        degrees: dict[str, Any] = mesh_for(strategies, world) if strategies else {"data": 1}
        with Mesh(**degrees, timeout=1800.0) as mesh:
            pictures, seconds, sent = _paint(config, model, factor, strategies, mesh)
            spent = gather(mesh, [sent], "end of a case")
            if not mesh.is_main:
                continue
        name = repr(strategies[0]) if strategies else "plain pipeline"
        row = {"case": name, "model": model, "factor": factor, "nproc": world, "size": list(pictures[0].size)}
        used = {"seconds": statistics.median(seconds), "bytes_sent": max(each[0] for each in spent) / len(pictures)}
        rows.append(row | _scores(config, model, factor, pictures) | used)
        label = f"{type(strategies[0]).__name__ if strategies else name} on {world}"
        tiles.append(Tile(pixels=np.asarray(pictures[0]), label=label))
    return rows, tiles


def _paint(
    config: Config, model: str, factor: int, strategies: tuple[Strategy, ...], mesh: Mesh
) -> tuple[list[Image.Image], list[float], float]:
    """Paints a picture of each caption, and returns them with their seconds and the bytes that this rank sent."""
    pipe: Any = zoo.load(model)
    pipe.set_progress_bar_config(disable=True)
    row, pictures, seconds = zoo.MODELS[model], list[Image.Image](), list[float]()
    size = row.defaults["width"] * factor
    call = dict(row.defaults) | {
        "height": size,
        "width": size,
        "num_inference_steps": config.steps,
        "guidance_scale": config.guidance,
    }
    captions, draws = row.task.captions(config.captions, config.seed), generators(config.seed, config.captions)
    with parallelize(pipe, *strategies, mesh=mesh) as plan, Ledger(flops=False) as ledger:
        for caption, draw in zip(captions, draws, strict=True):
            start = time.perf_counter()
            pictures += generate(plan, **call, prompt=caption, generator=draw).images
            seconds.append(time.perf_counter() - start)
        return pictures, seconds, ledger.summary().get("bytes_sent", 0.0)


def _scores(config: Config, model: str, factor: int, pictures: list[Image.Image]) -> dict[str, float]:
    row = zoo.MODELS[model]
    size = row.defaults["width"]
    small = [picture.resize((size, size), Image.Resampling.BOX) for picture in pictures]
    facts = map(row.task.facts_read, row.task.captions(config.captions, config.seed), small)
    return {
        "facts_read": statistics.mean(facts),
        "seams": statistics.median(seams(picture, factor) or 0.0 for picture in pictures),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    columns = ("model", "pixels", "method", "ranks", "facts read", "seams", "s", "times as fast", "MB sent")
    alone = {(row["model"], row["factor"], _painted(row)): row["seconds"] for row in rows if row["nproc"] == 1}
    lines = [
        (
            row["model"],
            " x ".join(map(str, row["size"])),
            f"`{row['case']}`" if "(" in row["case"] else row["case"],
            row["nproc"],
            f"{100 * row['facts_read']:.1f} %",
            f"{row['seams']:.2f}",
            f"{row['seconds']:.2f}",
            f"{alone[row['model'], row['factor'], _painted(row)] / row['seconds']:.2f}x",
            f"{row['bytes_sent'] / 1e6:.1f}",
        )
        for row in rows
    ]
    return markdown_table(columns, lines)


def _painted(row: dict[str, Any]) -> bool:
    """Whether a row's picture is that of structure guidance; the others are the plain pipeline's."""
    return row["case"].startswith("StructureGuidance")


if __name__ == "__main__":
    main(tyro.cli(Config))
