"""Measures long videos of the zoo by every method: ``python benchmarks/video/zoo_video.py``.

Samples a video for each of several fresh captions with every method on each number of ranks, and scores facts, identity
and block borders. The result has a picture beside it, with a strip of frames of the first caption per method.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from PIL import Image

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.video.zoo_study import Case, study
from partsong import ClipParallel, DualParallel, LatentParallel, TimestepPipeline

MODEL, CAUSAL = "motion", "motion-causal"
#: The baseline, which runs on one rank only.
BASELINES = [Case(model=MODEL)]
CASES = [
    Case(model=MODEL, strategy=ClipParallel()),
    Case(model=MODEL, strategy=ClipParallel(stride=4)),
    Case(model=MODEL, strategy=LatentParallel()),
    Case(model=MODEL, strategy=LatentParallel(context=2)),
    *(Case(model=MODEL, strategy=LatentParallel(context=2, overlap=overlap)) for overlap in (0.5, 0.75)),
    Case(model=MODEL, strategy=LatentParallel(context=None)),
    Case(model=MODEL, strategy=LatentParallel(overlap=0.75, dims="time")),
    Case(model=MODEL, strategy=DualParallel()),
    Case(model=MODEL, strategy=DualParallel(admit_every=3)),
    Case(model=MODEL, strategy=DualParallel(previous="recomputed")),
    Case(model=CAUSAL, strategy=TimestepPipeline()),
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    nproc: list[int] = field(default_factory=lambda: [2, 4])
    """Numbers of ranks."""
    frames: int = 159
    """Frames of each video, in blocks of eight latents with two frames each."""
    captions: int = 20
    """How many fresh captions, with one video each."""
    methods: tuple[str, ...] = ("",)
    """Only strategies whose names begin with one of these."""
    seed: int = 1
    """Seed of captions and noise; the settings of the models were chosen on 0."""


def main(config: Config) -> None:
    """Runs the study and writes the files."""
    note = (
        "The trained models of the zoo at their default steps, float32, one thread per rank. Facts over all captions, "
        "identity as the mean over videos of the part of frames that keep it; jumps at block borders over the 99th "
        "percentile of the others, trends of colour and size from first to last frame, seconds per video and bytes of "
        "the rank that sends most as medians or means over videos."
    )
    rows: list[dict[str, Any]] = []
    strips: list[np.ndarray] = []
    knobs: dict[str, Any] = {"frames": config.frames, "num_captions": config.captions, "seed": config.seed}
    chosen = [case for case in CASES if case.name.startswith(config.methods)]
    for cases, nproc in ((BASELINES, 1), *((chosen, nproc) for nproc in config.nproc)):
        measured, shown = study(cases, nproc=nproc, **knobs)
        rows, strips = rows + measured, strips + shown
        file_result(config.out, __file__, rows, "Long videos of the zoo", note, _table(rows))
    # The frames are the same on any number of ranks, so one strip per method is enough.
    sheet = np.concatenate(strips[: len(BASELINES) + len(chosen)])
    picture = Image.fromarray(np.rint(sheet * 255).astype(np.uint8))
    picture.resize((2 * picture.width, 2 * picture.height), Image.Resampling.NEAREST).save(
        config.out.with_suffix(".png")
    )


def _table(rows: list[dict[str, Any]]) -> str:
    columns = ("method", "model", "ranks", "facts read", "identity kept", "border jumps", "trend of colour, size", "s")
    lines = [
        (
            f"`{row['case']}`" if "(" in row["case"] else row["case"],
            row["model"],
            row["nproc"],
            f"{100 * row['facts_read']:.1f} %",
            f"{100 * row['identity_kept']:.1f} %",
            f"{row['border_jump_ratio']:.2f}",
            "" if row["trend_size"] is None else f"{100 * row['trend_colour']:.1f}, {100 * row['trend_size']:.1f} %",
            f"{row['seconds']:.1f}",
            f"{row['first_frame_seconds']:.1f}",
            " / ".join(f"{peak:.0f}" for peak in row["peak_memory_mb"]),
            f"{row['bytes_sent'] / 1e6:.1f}",
        )
        for row in rows
    ]
    return markdown_table((*columns, "first frame, s", "peak MB per rank", "MB sent"), lines)


if __name__ == "__main__":
    main(tyro.cli(Config))
