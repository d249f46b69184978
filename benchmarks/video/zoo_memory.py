"""Measures memory and drift of long streams of the zoo: ``python benchmarks/video/zoo_memory.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.video.memory_study import study
from partsong import CascadePipeline, DualParallel, TimestepPipeline
from partsong.parallel import Strategy

#: Model, strategy, frames, steps. A queue holds as many blocks as there are steps, so it is full only in a video with
#: at least that many blocks: 159 frames are ten blocks, which fill eight steps but not twenty.
CASES: list[tuple[str, Strategy, int, int | None]] = [
    ("motion", DualParallel(), 159, 8),
    ("motion", DualParallel(), 1599, 8),
    ("motion", DualParallel(), 159, None),
    ("motion", DualParallel(), 1599, None),
    ("motion-causal", TimestepPipeline(), 159, None),
    ("motion-causal", TimestepPipeline(), 1999, None),
    ("motion-clean", CascadePipeline(depth=4), 159, None),
    ("motion-clean", CascadePipeline(depth=4), 1999, None),
    ("motion-clean", CascadePipeline(depth=2), 1999, None),
]
#: The frame at which the caption changes.
SWITCHED = 200


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to stream."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    models: list[str] = field(default_factory=lambda: sorted({case[0] for case in CASES}))
    """Models whose streams are measured."""
    nproc: int = 2
    """Ranks, one thread each."""
    prompt: str = "a big red circle bounces left and right"
    """The caption to sample."""
    seed: int = 0
    """Seed of the noise."""
    later: str = "a small blue square bounces up and down"
    """The caption that takes over at frame 200 of the last case."""


def main(config: Config) -> None:
    """Streams and writes the files."""
    note = (
        "Resident memory of each rank in MB, without the frames that are kept for the scores: the most, the mean over "
        "the second quarter of the stream and over the last. Trends of colour and size are from first to last frame."
    )
    rows: list[dict[str, Any]] = []
    for model, strategy, frames, steps in (case for case in CASES if case[0] in config.models):
        named: dict[str, Any] = {"nproc": config.nproc, "frames": frames, "prompt": config.prompt, "seed": config.seed}
        named["steps"] = steps
        named["later"] = (SWITCHED, config.later) if (model, strategy, frames, steps) == CASES[-1] else None
        rows.append(study(model, strategy, **named))
        file_result(config.out, __file__, rows, "Memory of long streams", note, _table(rows))


def _table(rows: list[dict[str, Any]]) -> str:
    columns = (
        "strategy",
        "frames",
        "steps",
        "peak",
        "second quarter",
        "last quarter",
        "frames/s",
        "first frame, s",
        "facts read",
    )
    lines = [
        (
            f"`{row['case']}`",
            row["frames"],
            row["steps"],
            *(" / ".join(f"{value:.0f}" for value in row[name]) for name in ("peak_mb", "quarter_mb", "end_mb")),
            f"{row['frames_per_second']:.1f}",
            f"{row['first_frame_seconds']:.2f}",
            _facts(row),
            f"{100 * row['identity_kept']:.1f} %",
            f"{100 * row['trend_colour']:.1f}, {100 * row['trend_size']:.1f} %",
        )
        for row in rows
    ]
    return markdown_table((*columns, "identity kept", "trend of colour, size"), lines)


def _facts(row: dict[str, Any]) -> str:
    before = f"{100 * row['facts_read']:.0f} %"
    if row["later_facts_read"] is None:
        return before
    later = f"{100 * row['later_facts_read']:.0f} % of another caption's, read in clips of 31 frames"
    return f"{before} before frame {SWITCHED}, then {later}"


if __name__ == "__main__":
    main(tyro.cli(Config))
