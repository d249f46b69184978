"""Measures drift of `shapes` under lagged layers: ``python benchmarks/drift/lagged_layers.py``.

The pictures depend on the runs of blocks and not on the ranks, so they are made on one rank. A rank for every run makes
the first caption's picture again: its bytes are counted there, and it must be the same to the last bit. Rounds are what
is computed one after the other, in calls of the whole model: a lagged step counts as its longest run.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from benchmarks.drift.study import study
from benchmarks.filing import file_result, markdown_table, result_path
from partsong import LaggedLayers, zoo
from partsong.outputs import psnr
from partsong.parallel import launch, parallelize
from partsong.seeds import generators

MODEL = "shapes"
CASES = [
    *(LaggedLayers(components=2, warmup_steps=steps) for steps in (2, 4, 8)),
    LaggedLayers(components=2, warmup_steps=4, order=0),
    *(LaggedLayers(components=2, warmup_steps=4, window=window) for window in (5, 12)),
    *(LaggedLayers(components=2, warmup_steps=4, stride=2, order=order) for order in (0, 1)),
    *(LaggedLayers(components=3, warmup_steps=4, order=order) for order in (0, 1)),
]
#: Numbers of steps of the plain pipeline, for comparison.
FEWER = (21, 18, 16, 14)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    captions: int = 100
    """How many fresh captions."""
    seed: int = 0
    """Seed of captions and noise."""


def rounds(knobs: LaggedLayers, steps: int, blocks: int = 6) -> float:
    """Returns a generation's sequential computation, in calls of the whole model."""
    longest, total = -(-blocks // (knobs.components or 1)), 0.0
    for step in range(steps):
        lag = step - knobs.warmup_steps
        if lag < 0 or (knobs.window is not None and lag >= knobs.window):
            total += 1
        elif lag % knobs.stride == 0:
            total += longest / blocks
    return total


def picture(knobs: LaggedLayers, caption: str, seed: int) -> dict[str, Any]:
    """Makes a caption's picture on the ranks there are; returns it, and the bytes that the busiest rank sent."""
    torch.set_num_threads(1)
    row, pipe = zoo.MODELS[MODEL], zoo.load(MODEL)
    pipe.set_progress_bar_config(disable=True)
    with parallelize(pipe, knobs) as plan:
        asked = {**row.defaults, "output_type": "np", "generator": generators(seed, 1)}
        image = pipe(prompt=[caption], **asked).images[0]
        return {"image": image, "bytes_sent": max(plan.explain().bytes_total())}


def fewer_steps(config: Config) -> list[dict[str, Any]]:
    """Samples with fewer steps, on one rank."""
    row, pipe = zoo.MODELS[MODEL], zoo.load(MODEL)
    pipe.set_progress_bar_config(disable=True)
    captions = row.task.captions(config.captions, config.seed)

    def sample(steps: int) -> Any:
        draws = generators(config.seed, len(captions))
        parts = []
        for start in range(0, len(captions), 25):
            part = slice(start, start + 25)
            asked = {**row.defaults, "num_inference_steps": steps, "output_type": "np"}
            parts.append(pipe(prompt=captions[part], generator=draws[part], **asked).images)
        return np.concatenate(parts)

    serial, rows = sample(row.defaults["num_inference_steps"]), []
    for steps in FEWER:
        images = sample(steps)
        drift = [min(psnr(one, other), 999.0) for one, other in zip(images, serial, strict=True)]
        facts = [row.task.facts_read(caption, image) for caption, image in zip(captions, images, strict=True)]
        values = {"psnr_median": statistics.median(drift), "psnr_min": min(drift), "bytes_sent": 0}
        rows.append(
            {"case": f"{steps} steps", "nproc": 1, "facts_read": statistics.fmean(facts), "rounds": steps, **values}
        )
    return rows


def main(config: Config) -> None:
    """Samples and writes the files."""
    torch.set_num_threads(1)
    steps = zoo.MODELS[MODEL].defaults["num_inference_steps"]
    first = zoo.MODELS[MODEL].task.captions(1, config.seed)[0]
    measured = study([(case,) for case in CASES], nproc=1, num_captions=config.captions, seed=config.seed)
    rows = [{**measured[0], "rounds": float(steps)}]
    for case, row in zip(CASES, measured[1:], strict=True):
        made = launch(picture, case.components or 1, case, first, config.seed)
        same = bool(np.array_equal(made["image"], picture(case, first, config.seed)["image"]))
        moved = {"bytes_sent": made["bytes_sent"], "same_bits": same, "nproc": case.components}
        rows.append({**row, **moved, "rounds": rounds(case, steps)})
    _file(config, steps, rows + fewer_steps(config))


def _file(config: Config, steps: int, rows: list[dict[str, Any]]) -> None:
    note = (
        f"`shapes` at {steps} steps and its default guidance, float32, {config.captions} captions in batches of 25. "
        "Rounds are what is computed one after the other, in calls of the whole model. PSNR in dB against the pipeline "
        "alone; kilobytes that the busiest of `components` ranks sends for one picture, which is the same there to the "
        "last bit. Seconds were not compared."
    )
    columns = ("ranks", "case", "rounds", "PSNR median", "worst", "facts read", "kB")
    lines = [
        (
            each["nproc"],
            f"`{each['case']}`",
            f"{each['rounds']:.1f}",
            f"{each['psnr_median']:.1f}",
            f"{each['psnr_min']:.1f}",
            f"{100 * each['facts_read']:.1f} %",
            f"{each['bytes_sent'] / 1e3:.0f}",
        )
        for each in rows
    ]
    table = markdown_table(columns, lines)
    file_result(config.out, __file__, rows, "Drift under lagged layers", note, table)


if __name__ == "__main__":
    main(tyro.cli(Config))
