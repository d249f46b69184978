"""Streams a video without end from a causal model, one rank per denoising step, into a file that plays at any time.

Ctrl-C stops it: all ranks finish the current block, the file is closed, and the speed is reported.

The zoo's causal model:  python recipes/stream_video.py --nproc 2
A real one:              python recipes/stream_video.py --model PATH --nproc 4 --steps 4 --guidance 1 --prompt "..."

The model's transformer must be causal: ``num_frame_per_block`` of 2 or more in its configuration.
"""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging

from partsong import TimestepPipeline, zoo
from partsong.parallel import Mesh, parallelize
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.launch import launch
from partsong.parallel.ranks.mesh import AXES
from partsong.samplers import stream
from partsong.samplers.long_video.causal_block import causal_block
from partsong.samplers.long_video.frame_counts import temporal_factor
from partsong.videos import VideoWriter


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    prompt: str = "a small blue square moves up"
    """What the video shows."""
    model: str = "motion-causal"
    """A name of the zoo, or a diffusers folder with a causal model."""
    out: Path = Path("runs/stream.mp4")
    """The video to write, or a name without an ending for a folder of pictures."""
    nproc: int = 2
    """How many ranks there are."""
    blocks: int = 1_000_000
    """After how many blocks it stops by itself."""
    window: int = 3
    """How many blocks of the past are seen."""
    sink: int = 1
    """How many first frames are always seen."""
    steps: int | None = None
    """Denoising steps. Default: the model's own."""
    guidance: float | None = None
    """Guidance scale. Default: the model's own."""
    height: int | None = None
    """Height in pixels. Default: the model's own."""
    width: int | None = None
    """Width in pixels. Default: the model's own."""
    seed: int = 0
    """The seed of the noise."""
    fps: float = 16.0
    """Frames per second of the video."""
    dtype: str = "float32"
    """The type of weights and arithmetic."""


def on_rank(config: Config) -> dict[str, float]:
    """Streams on this rank until Ctrl-C is pressed; returns the number of frames and the seconds."""
    stopped: list[int] = []
    signal.signal(signal.SIGINT, lambda *_: stopped.append(1))  # the current block is finished first
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    torch.set_num_threads(1 if config.nproc > 1 else torch.get_num_threads())
    dtype = getattr(torch, config.dtype)
    with Mesh(stage=config.nproc, timeout=3600.0) as mesh:
        row: zoo.ZooModel | None = zoo.MODELS.get(config.model)
        if row is None:
            pipe: Any = DiffusionPipeline.from_pretrained(config.model, torch_dtype=dtype, local_files_only=True)
        else:
            pipe = zoo.load(row.name, dtype)
        chosen = {"num_inference_steps": config.steps, "guidance_scale": config.guidance}
        chosen |= {"height": config.height, "width": config.width}
        named: dict[str, Any] = {} if row is None else dict(row.defaults)
        named |= {name: value for name, value in chosen.items() if value is not None}
        named |= {"prompt": config.prompt, "generator": torch.Generator().manual_seed(config.seed)}
        latent_frames = config.blocks * causal_block(pipe.transformer)
        named |= {"num_frames": (latent_frames - 1) * (temporal_factor(pipe) or 1) + 1, "output_type": "np"}
        knobs = TimestepPipeline(window=config.window, sink=config.sink)
        with parallelize(pipe.to(mesh.device), knobs, mesh=mesh) as plan:
            return _write(config, mesh, stream(plan, **named), stopped)


def _write(config: Config, mesh: Mesh, parts: Any, stopped: list[int]) -> dict[str, float]:
    writer = VideoWriter(config.out, fps=config.fps) if mesh.is_main else None
    start, first, everyone = time.perf_counter(), 0.0, mesh.axis(*AXES)
    try:
        for number, part in enumerate(parts):
            if writer is not None:
                writer.append(part.frames[0])
                first = first or time.perf_counter() - start
            if number % 4 == 0:
                logging.info("%d blocks, %.1f s", number + 1, time.perf_counter() - start)
            # All ranks stop after the same block, whichever of them got the signal.
            if any(row[0] for row in agree(everyone, [float(len(stopped))], name="whether to stop")):
                break
    finally:
        parts.close()
        if writer is not None:
            writer.close()
    seconds = time.perf_counter() - start
    frames = writer.frames if writer is not None else 0
    return {"frames": frames, "seconds": seconds, "frames_per_second": frames / seconds, "first_frame_seconds": first}


def main() -> None:
    """Runs the recipe."""
    config = tyro.cli(Config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks handle it
    speed = launch(on_rank, config.nproc, config)
    logging.info("%s: %s", config.out, ", ".join(f"{name} {value:.4g}" for name, value in speed.items()))


if __name__ == "__main__":
    main()
