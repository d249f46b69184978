"""Measures drift of `shapes` under lagged layers: ``python benchmarks/lagged_layers.py --out benchmarks/NAME``.

Every case runs on as many ranks as it has runs of blocks. Rounds are what is computed one after the other, in calls of
the whole model: a lagged step counts as its longest run.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from filing import file_result, markdown_table

from partsong import LaggedLayers, zoo
from partsong.evals.zoo.drift import study
from partsong.outputs import psnr
from partsong.seeds import generators

MODEL = "shapes"
CASES: dict[int, list[LaggedLayers]] = {
    2: [
        *(LaggedLayers(warmup_steps=steps, order=order) for steps in (2, 4, 8) for order in (0, 1)),
        *(LaggedLayers(warmup_steps=4, window=window) for window in (5, 12)),
        *(LaggedLayers(warmup_steps=4, stride=2, order=order) for order in (0, 1)),
    ],
    3: [LaggedLayers(warmup_steps=4, order=order) for order in (0, 1)],
}
#: Numbers of steps of the pipeline alone, for comparison.
FEWER = (21, 18, 16, 14)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path
    """Result files without suffix."""
    captions: int = 100
    """How many fresh captions."""
    seed: int = 0
    """Seed of captions and noise."""


def rounds(knobs: LaggedLayers, runs: int, steps: int) -> float:
    """Returns what a generation computes one after the other, in calls of the whole model."""
    blocks = 6
    total = 0.0
    for step in range(steps):
        lag = step - knobs.warmup_steps
        if lag < 0 or (knobs.window is not None and lag >= knobs.window):
            total += 1
        elif lag % knobs.stride == 0:
            total += -(-blocks // runs) / blocks
    return total


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
    rows: list[dict[str, Any]] = []
    for nproc, cases in CASES.items():
        measured = study([(case,) for case in cases], nproc=nproc, num_captions=config.captions, seed=config.seed)
        known = [float(steps), *(rounds(case, nproc, steps) for case in cases)]
        rows += [{**row, "rounds": each} for row, each in zip(measured, known, strict=True)][bool(rows) :]
        _file(config, steps, rows)
    _file(config, steps, rows + fewer_steps(config))


def _file(config: Config, steps: int, rows: list[dict[str, Any]]) -> None:
    note = (
        f"`shapes` at {steps} steps and its default guidance, float32, {config.captions} captions in batches of 25. "
        "Rounds are what is computed one after the other, in calls of the whole model. PSNR in dB against the pipeline "
        "alone; kilobytes that the busiest rank sends per picture. Seconds were not compared."
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
    file_result(config.out, "benchmarks/lagged_layers.py", rows, "Drift under lagged layers", note, table)


if __name__ == "__main__":
    main(tyro.cli(Config))
