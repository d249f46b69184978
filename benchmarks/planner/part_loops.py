"""Compares predictions with this machine for loops of parts: ``python benchmarks/planner/part_loops.py``.

These loops call the denoiser for patches of a picture or for blocks of frames. Ranks of one thread each run the zoo's
models without decoding, and the planner predicts the same runs from a calibration made right before.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong import CascadePipeline, DualParallel, StructureGuidance, TimestepPipeline, zoo
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.load import LoadWatch
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.launch import launch
from partsong.planner.calibration import Calibration, calibrate
from partsong.planner.clock import clock_steps
from partsong.planner.estimate import flags
from partsong.planner.pipeline import subject_of
from partsong.planner.steps import Tracer
from partsong.samplers import generate

_TEXT, _MOVING = "a red circle left of a blue square", "a big red circle bounces left and right"
#: Model, loop, and what of its call is not the model's own.
CASES: list[tuple[str, Strategy, dict[str, Any]]] = [
    ("shapes", StructureGuidance(), {"prompt": _TEXT, "height": 256, "width": 256, "num_inference_steps": 8}),
    ("shapes-unet", StructureGuidance(), {"prompt": _TEXT, "height": 128, "width": 128, "num_inference_steps": 8}),
    ("motion", DualParallel(), {"prompt": _MOVING, "num_frames": 159, "num_inference_steps": 8}),
    (
        "motion",
        DualParallel(previous="recomputed"),
        {"prompt": _MOVING, "num_frames": 159, "num_inference_steps": 8},
    ),
    ("motion-causal", TimestepPipeline(), {"prompt": _MOVING, "num_frames": 159}),
    ("motion-clean", CascadePipeline(depth=2), {"prompt": _MOVING, "num_frames": 159}),
    ("motion-clean", CascadePipeline(depth=4), {"prompt": _MOVING, "num_frames": 159}),
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to time."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    nproc: int = 2
    """Ranks, one thread each; every case runs on one rank, too."""
    repeats: int = 5
    """Rounds; the median counts."""


def main(config: Config) -> None:
    """Calibrates, times and predicts every case, and writes the files."""
    watch, machine = LoadWatch(), calibrate(config.nproc)
    counts = sorted({1, config.nproc})
    measured = {ranks: launch(_timed, ranks, ranks, config.repeats) for ranks in counts}
    rows = [_row(place, ranks, machine, measured[ranks][place]) for place in range(len(CASES)) for ranks in counts]
    errors = sorted(abs(row["error"]) for row in rows)
    moved = [row["predicted_bytes"] / row["bytes"] for row in rows if row["bytes"]]
    note = (
        "Seconds of all denoising steps without decoding, float32, one thread per rank, median. Predictions come from "
        f"a calibration right before. Median error {100 * statistics.median(errors):.0f} %, at most "
        f"{100 * errors[-1]:.0f} %; predicted bytes are {min(moved):.2f} to {max(moved):.2f} of those counted."
    )
    lines = [
        (
            row["model"],
            f"`{row['loop']}`",
            row["ranks"],
            f"{row['seconds']:.2f}",
            f"{row['predicted']:.2f}",
            f"{100 * row['error']:+.0f} %",
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['predicted_bytes'] / 1e6:.2f}",
        )
        for row in rows
    ]
    columns = ("model", "loop", "ranks", "seconds", "predicted", "error", "MB of the first rank", "predicted MB")
    table = markdown_table(columns, lines)
    file_result(config.out, __file__, rows, "Predictions of loops of parts", note, table, load=watch.report())


def _call(place: int) -> tuple[Any, dict[str, Any]]:
    name, _, changed = CASES[place]
    pipe = zoo.load(name)
    pipe.set_progress_bar_config(disable=True)
    return pipe, {**zoo.MODELS[name].defaults, **changed}


def _timed(nproc: int, repeats: int) -> list[dict[str, Any]]:
    quiet_libraries()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = [{"seconds_all": []} for _ in CASES]
    with Mesh(data=nproc) as whole:
        for number in range(repeats + 1):
            for place, (_, loop, _) in enumerate(CASES):
                pipe, call = _call(place)
                mesh = Mesh(**mesh_for((loop,), nproc))
                with parallelize(pipe, loop, mesh=mesh) as plan, Ledger(flops=False) as ledger:
                    agree(whole.axis("data"), [0.0])
                    start = time.perf_counter()
                    generate(plan, **call, output_type="latent", generator=torch.Generator().manual_seed(0))
                    seconds = max(each for (each,) in agree(whole.axis("data"), [time.perf_counter() - start]))
                if number:
                    rows[place]["seconds_all"].append(seconds)
                rows[place]["bytes"] = ledger.summary().get("bytes_sent", 0)
    return rows


def _row(place: int, ranks: int, machine: Calibration, measured: dict[str, Any]) -> dict[str, Any]:
    name, loop, _ = CASES[place]
    pipe, call = _call(place)
    subject = subject_of(pipe, **call)
    tracer = Tracer(subject, subject.sized(None, None, None, 1), fused=False)
    steps = call.get("num_inference_steps", subject.steps)
    traced = tracer.trace([loop], ranks, steps)
    seconds = statistics.median(measured["seconds_all"])
    predicted = clock_steps(traced, machine.machine(ranks)).seconds
    return {
        "model": name,
        "loop": flags([loop]),
        "ranks": ranks,
        "seconds": seconds,
        "predicted": predicted,
        "error": predicted / seconds - 1,
        "bytes": measured["bytes"],
        "predicted_bytes": traced.bytes_sent if ranks > 1 else 0,
    }


if __name__ == "__main__":
    main(tyro.cli(Config))
