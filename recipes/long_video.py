"""Makes a video ten times as long as the model's training videos, by every method, and compares them.

Sliding windows on one process are the serial way. `ClipParallel` gives each rank a part of the frames, `DualParallel`
sends blocks of frames through layers, `TimestepPipeline` streams blocks of a causal model through denoising steps; all
three make the same video on any number of ranks. Each method writes a video; a sheet shows frames of all of them, one
row per method; a report tells time, memory, bytes and, for the zoo, the facts of the caption read from the video.

The zoo's models:            python recipes/long_video.py --out runs/long
A real Wan folder:           python recipes/long_video.py --model PATH --methods clip dual --frames 801 --guidance 5
                             --prompt "a lighthouse at dusk" --window 21 --dtype bfloat16 --nproc 8
"""

from __future__ import annotations

import json
import logging
import os
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from PIL import Image

from partsong import ClipParallel, DualParallel, TimestepPipeline, zoo
from partsong.jobs.compare import gather
from partsong.jobs.video_run import VideoRun, sample_video
from partsong.ledger import Ledger
from partsong.parallel import Mesh, mesh_for, parallelize
from partsong.parallel.ranks.launch import launch
from partsong.samplers.long_video.sliding_windows import sliding_windows
from partsong.videos import VideoWriter

Method = Literal["windows", "clip", "dual", "timestep"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The knobs of the recipe; every field is also a command-line flag."""

    prompt: str = "a big red circle bounces left and right, a small blue square moves up"
    """What to show."""
    model: str = "motion"
    """A name of the zoo, or a folder with a video pipeline."""
    causal: str = "motion-causal"
    """The same for `timestep`, whose model must see the past alone."""
    methods: tuple[Method, ...] = ("windows", "clip", "dual", "timestep")
    """Which to run, in order."""
    frames: int = 319
    """Of the video; the models were trained on 31."""
    window: int = 16
    """Latent frames of a training video."""
    nproc: int = 2
    """Ranks."""
    out: Path = Path("runs/long")
    """Folder for videos, sheet and report."""
    seed: int = 0
    """Of the noise."""
    steps: int | None = None
    """Denoising steps; the model's own default if not given."""
    guidance: float | None = None
    """Guidance scale; the model's own default if not given."""
    fps: float = 16.0
    """Frames per second of the videos."""
    dtype: str = "float32"
    """Of weights and arithmetic."""


def strategy_of(config: Config, method: str) -> Any:
    """What makes the video long; None for windows on one process."""
    half = config.window // 2
    return {
        "clip": ClipParallel(window=half),
        "dual": DualParallel(block_frames=half, context=half),
        "timestep": TimestepPipeline(),
    }.get(method)


def load(config: Config, method: str) -> tuple[Any, dict[str, Any]]:
    """The pipeline and the arguments of its call."""
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    name, dtype = config.causal if method == "timestep" else config.model, getattr(torch, config.dtype)
    if name in zoo.MODELS:
        pipe, named = zoo.load(name, dtype), dict(zoo.MODELS[name].defaults)
    else:
        pipe, named = DiffusionPipeline.from_pretrained(name, torch_dtype=dtype, local_files_only=True), {}
    chosen = {"num_inference_steps": config.steps, "guidance_scale": config.guidance}
    # A few-step model keeps its own: `steps` and `guidance` are for the other.
    named |= {} if method == "timestep" else {key: value for key, value in chosen.items() if value is not None}
    named |= {"prompt": config.prompt, "num_frames": config.frames}
    return pipe, {**named, "generator": torch.Generator().manual_seed(config.seed)}


def on_rank(config: Config, method: str) -> tuple[dict[str, Any], np.ndarray]:
    """One method on this rank; on the first, what was measured and a strip of frames."""
    torch.set_num_threads(1 if config.nproc > 1 else torch.get_num_threads())
    strategy, world = strategy_of(config, method), int(os.environ.get("WORLD_SIZE", "1"))
    degrees: dict[str, Any] = mesh_for((strategy,), world) if strategy else {}
    with Mesh(**degrees, timeout=3600.0) as mesh:
        pipe, named = load(config, method)
        pipe.to(mesh.device).set_progress_bar_config(disable=True)
        writer = VideoWriter(config.out / f"{method}.mp4", fps=config.fps) if mesh.is_main else None
        with Ledger(flops=False) as ledger:
            if strategy is None:
                run = sample_video(
                    lambda **call: sliding_windows(pipe, window=config.window, **call), named, writer=writer
                )
            else:
                with parallelize(pipe, strategy, mesh=mesh) as plan:
                    run = sample_video(plan, named, writer=writer, keeps=mesh.is_main)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
        if mesh.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(mesh.device) / 2**20
        ranks = gather(mesh, [ledger.summary().get("bytes_sent", 0.0), peak], "end of a method")
        return (report(config, method, run, ranks), strip(run)) if mesh.is_main else ({}, np.empty(0))


def report(config: Config, method: str, run: VideoRun, ranks: list[list[float]]) -> dict[str, Any]:
    """What was measured."""
    name = config.causal if method == "timestep" else config.model
    found: dict[str, Any] = {
        "method": method,
        "model": name,
        "nproc": len(ranks),
        "frames": run.num_frames,
        "seconds": round(run.seconds, 2),
        "first_frame_seconds": round(run.first, 2),
        "frames_per_second": round(run.num_frames / run.seconds, 2),
        "bytes_sent": [int(row[0]) for row in ranks],
        "peak_memory_mb": [round(row[1]) for row in ranks],
    }
    if name in zoo.MODELS:
        task, video = zoo.MODELS[name].task, np.concatenate(run.frames)
        found["facts_read"] = task.facts_read(config.prompt, video)
        if found["facts_read"] is not None:
            found["identity_kept"] = task.identity_kept(config.prompt, video)
    return found


def strip(run: VideoRun, count: int = 16) -> np.ndarray:
    """Evenly spaced frames side by side, `[H, W * count, 3]`."""
    video = np.concatenate(run.frames)
    return np.concatenate(list(video[np.linspace(0, len(video) - 1, count).round().astype(int)]), axis=1)


def main() -> None:
    """Runs the recipe."""
    config = tyro.cli(Config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    config.out.mkdir(parents=True, exist_ok=True)
    rows, strips = [], []
    for method in config.methods:
        row, shown = launch(on_rank, 1 if method == "windows" else config.nproc, config, method)
        rows, strips = [*rows, row], [*strips, shown]
        logging.info(", ".join(f"{name} {value}" for name, value in row.items()))
    width = min(strip.shape[1] for strip in strips)
    sheet = np.concatenate([strip[:, :width] for strip in strips])
    picture = Image.fromarray(np.rint(sheet * 255).astype(np.uint8))
    scale = max(1, 1024 // picture.width)
    picture.resize((scale * picture.width, scale * picture.height), Image.Resampling.NEAREST).save(
        config.out / "sheet.png"
    )
    settings = {name: str(value) for name, value in asdict(config).items()}
    (config.out / "report.json").write_text(json.dumps({"config": settings, "rows": rows}, indent=1) + "\n")
    logging.info("%s: videos, sheet.png and report.json", config.out)


if __name__ == "__main__":
    main()
