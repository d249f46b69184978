"""Measures block cascading on the zoo's causal models: ``python benchmarks/video/cascade.py``.

Quality is that of videos at several depths on one rank: the frames are the same on any number of ranks. Seconds per
block are those of one rank and of several by turns, each the median over rounds.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from diffusers import SkyReelsV2Transformer3DModel

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.video.zoo_study import Case, study
from partsong import CascadePipeline, TimestepPipeline, zoo
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.compare import gather
from partsong.parallel import Mesh, parallelize
from partsong.parallel.ranks.launch import launch
from partsong.samplers import stream

#: Reads a past that is at its own noise level, and one that reads clean blocks.
NOISY, CLEAN = "motion-causal", "motion-clean"
#: Pixels of a side with random weights.
WIDE = 64


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    depths: list[int] = field(default_factory=lambda: [1, 2, 4])
    """Blocks that are denoised together; 4 is the model's number of steps."""
    captions: int = 20
    """Fresh captions, one video each; 0 measures no quality."""
    frames: int = 159
    """Frames of each video, in blocks of four latents with two frames each."""
    nproc: int = 2
    """Ranks beside one, one thread each."""
    rounds: int = 5
    """Videos on each number of ranks, by turns; 0 measures no times."""
    wide: bool = False
    """Whether times are of random weights in a wider transformer, on larger frames: exchanges weigh less there."""
    seed: int = 1
    """Seed of captions and noise."""


def main(config: Config) -> None:
    """Measures and writes the files."""
    note = (
        "The zoo's causal models at their four steps, float32, one thread per rank: TimestepPipeline on motion-causal, "
        "CascadePipeline on motion-clean. Facts over all captions, identity as the mean over videos of the "
        "part of frames that keep it. Seconds per block of eight frames, without decoding, after the first block."
    )
    cases = [Case(model=NOISY, strategy=TimestepPipeline())]
    cases += [Case(model=CLEAN, strategy=CascadePipeline(depth=depth)) for depth in config.depths]
    rows: list[dict[str, Any]] = [{"case": case.name} for case in cases]
    if config.wide:
        note += f" Times are of random weights of twice the width, eight layers, at {WIDE} x {WIDE} pixels."
    if config.captions:
        knobs = {"frames": config.frames, "num_captions": config.captions, "seed": config.seed}
        found, _ = study(cases, nproc=1, **knobs)
        rows = [row | scores for row, scores in zip(rows, found, strict=True)]
    if config.rounds:
        knobs = (config.nproc, config.frames, config.rounds, config.wide)
        seconds = launch(_times, config.nproc, tuple(cases), *knobs)
        rows = [row | times for row, times in zip(rows, seconds, strict=True)]
    file_result(config.out, __file__, rows, "Block cascading on the zoo's causal models", note, _table(rows))


def _times(cases: tuple[Case, ...], nproc: int, frames: int, rounds: int, wide: bool) -> list[dict[str, Any]]:
    """Times every strategy on one rank and on all, by turns."""
    quiet_libraries()
    torch.set_num_threads(1)
    rows = []
    with Mesh(stage=nproc, timeout=1800.0) as mesh:
        for case in cases:
            pipe: Any = zoo.load(case.model)
            pipe.set_progress_bar_config(disable=True)
            size = {"height": WIDE, "width": WIDE} if wide else {}
            if wide:
                pipe.register_modules(transformer=_wider(pipe.transformer))
            alone: list[float] = []
            together: list[float] = []
            for number in range(rounds + 1):
                first = _per_block(pipe, case, mesh.alone(), frames, **size) if mesh.is_main else 0.0
                gather(mesh, [0.0], "wait for one rank")
                second = _per_block(pipe, case, mesh, frames, **size)
                gather(mesh, [0.0], "end of a round")
                if number:  # the first one warms up
                    alone, together = [*alone, first], [*together, second]
            one, all_of_them = statistics.median(alone), statistics.median(together)
            seconds = {"seconds_serial": one, "seconds_median": all_of_them, "ratio_to_serial": one / all_of_them}
            rows.append({"nproc": nproc, **seconds, "seconds_serial_all": alone, "seconds_all": together})
    return rows


def _wider(transformer: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 12, "ffn_dim": 1536, "num_layers": 8}
    return SkyReelsV2Transformer3DModel(**{**transformer.config, **sizes}).eval()


def _per_block(pipe: Any, case: Case, mesh: Mesh, frames: int, **size: int) -> float:
    assert case.strategy is not None
    named = {
        **zoo.MODELS[case.model].defaults,
        "num_frames": frames,
        "prompt": "a big red circle bounces left and right",
        **size,
    }
    draw = torch.Generator().manual_seed(0)
    with parallelize(pipe, case.strategy, mesh=mesh) as plan:
        times = [time.perf_counter() for _ in stream(plan, **named, output_type="latent", generator=draw)]
    return (times[-1] - times[0]) / (len(times) - 1)


def _table(rows: list[dict[str, Any]]) -> str:
    columns = ["strategy", "facts read", "identity kept", "border jumps", "s per block, 1 rank", "several", "ratio"]
    lines = []
    for row in rows:
        cells = [f"`{row['case']}`"]
        quality = (("facts_read", 100, ".1f"), ("identity_kept", 100, ".1f"), ("border_jump_ratio", 1, ".2f"))
        seconds = (("seconds_serial", 1, ".3f"), ("seconds_median", 1, ".3f"), ("ratio_to_serial", 1, ".2f"))
        cells += [f"{row[name] * scale:{form}}" if name in row else "" for name, scale, form in (*quality, *seconds)]
        lines.append(tuple(cells))
    return markdown_table(tuple(columns), lines)


if __name__ == "__main__":
    main(tyro.cli(Config))
