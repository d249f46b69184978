"""Streams a video without end from a causal model, one rank per denoising step, into a file that plays at any time.

Ctrl-C stops it: all ranks finish the current block, the file is closed, a sheet of frames is drawn beside it, and the
speed is reported. With --journal a stream that was stopped, or killed, goes on from its last block when it is started
again; it writes the same frames from the first on, since a video file cannot be continued.

The zoo's causal model:
    python recipes/stream_video.py --nproc 2
A causal model in a folder of yours, four GPUs:
    python recipes/stream_video.py --model PATH --nproc 4 --steps 4 --guidance 1 --dtype bfloat16 \
        --prompt "a lighthouse at dusk" --out runs/dusk.mp4 --journal runs/dusk
A checkpoint of Self-Forcing, CausVid or LongLive, whose blocks read clean ones, four GPUs:
    python recipes/stream_video.py --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --checkpoint self_forcing_dmd.pt --depth 4 \
        --nproc 4 --steps 4 --guidance 1 --dtype bfloat16 --window 7 --height 480 --width 832

Without a checkpoint the model's transformer must be causal: ``num_frame_per_block`` of 2 or more in its configuration.
"""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro

from partsong import CascadePipeline, TimestepPipeline, parse_strategy, zoo
from partsong.evals.pictures.sheet import Panel, Row, Tile, draw_sheet
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.pipeline_source import find_pipeline
from partsong.jobs.pipelines import read_pipeline
from partsong.outputs import rgb_bytes
from partsong.parallel import Mesh, Strategy, parallelize
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.launch import launch
from partsong.parallel.ranks.mesh import AXES
from partsong.samplers import load_causal_checkpoint, stream
from partsong.samplers.long_video.causal_block import causal_block
from partsong.samplers.long_video.frame_counts import temporal_factor
from partsong.videos import FrameSample, VideoWriter


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    prompt: str = "a small blue square moves up"
    """What the video shows."""
    then: dict[int, str] = field(default_factory=dict)
    """Texts that take over later, by the first frame: ``--then 200 "a big red circle moves right"``."""
    model: str = "motion-causal"
    """A name of the zoo, a diffusers folder with a causal model, or its name on the hub."""
    checkpoint: Path | None = None
    """A file of causal weights for a model of Wan, as the repositories of Self-Forcing and its kin store it."""
    depth: int | None = None
    """How many blocks are denoised together, for models that read clean blocks. Default: 2 with a checkpoint, otherwise
    one rank makes one step of every block."""
    out: Path = Path("runs/stream.mp4")
    """The video to write, or a name without an ending for a folder of pictures."""
    journal: Path | None = None
    """A folder for the progress, from which a stream that was stopped goes on."""
    nproc: int = 2
    """How many ranks there are."""
    beside: tuple[str, ...] = ()
    """Strategies beside the loop, as on a command line: encode-once, parallel-vae."""
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
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    signal.signal(signal.SIGINT, lambda *_: stopped.append(1))  # the current block is finished first
    quiet_libraries()
    torch.set_num_threads(1 if config.nproc > 1 else torch.get_num_threads())
    with Mesh(stage=config.nproc, timeout=3600.0) as mesh:
        source = find_pipeline(config.model)
        pipe = zoo.complete(source.zoo_name, read_pipeline(source.folder, source.pipeline, config.dtype))
        if config.checkpoint is not None:
            load_causal_checkpoint(pipe, config.checkpoint)
        chosen = {"num_inference_steps": config.steps, "guidance_scale": config.guidance}
        chosen |= {"height": config.height, "width": config.width}
        named: dict[str, Any] = dict(source.defaults)
        named |= {name: value for name, value in chosen.items() if value is not None}
        named |= {"prompt": config.prompt, "generator": torch.Generator().manual_seed(config.seed)}
        latent_frames = config.blocks * causal_block(pipe.transformer)
        named |= {"num_frames": (latent_frames - 1) * (temporal_factor(pipe) or 1) + 1, "output_type": "np"}
        with parallelize(pipe.to(mesh.device), *_strategies(config), mesh=mesh) as plan:
            return _write(config, mesh, stream(plan, journal=config.journal, prompts=config.then, **named), stopped)


def _strategies(config: Config) -> list[Strategy]:
    depth = config.depth or (2 if config.checkpoint is not None else None)
    loop: Strategy = TimestepPipeline(window=config.window, sink=config.sink)
    if depth is not None:
        loop = CascadePipeline(depth=depth, window=config.window, sink=config.sink)
    return [loop, *map(parse_strategy, config.beside)]


def _write(config: Config, mesh: Mesh, parts: Any, stopped: list[int]) -> dict[str, float]:
    writer = VideoWriter(config.out, fps=config.fps) if mesh.is_main else None
    start, first, everyone, shown = time.perf_counter(), 0.0, mesh.axis(*AXES), FrameSample(18)
    try:
        for number, part in enumerate(parts):
            if writer is not None:
                writer.append(part.frames[0])
                shown.append(rgb_bytes(frame) for frame in part.frames[0])
                first = first or time.perf_counter() - start
            if number % 4 == 0 and writer is not None:
                logging.info("%d frames, %.1f s", writer.frames, time.perf_counter() - start)
            # All ranks stop after the same block, whichever of them got the signal.
            if any(row[0] for row in agree(everyone, [float(len(stopped))], name="whether to stop")):
                break
    finally:
        parts.close()
        if writer is not None:
            writer.close()
    seconds = time.perf_counter() - start
    frames = writer.frames if writer is not None else 0
    if frames:
        title = ", ".join([config.prompt, *(f"from frame {at} {text}" for at, text in config.then.items())])
        draw_sheet(title, [_panel(shown, frames, seconds)]).save(config.out.with_name(f"{config.out.stem}-sheet.png"))
    return {"frames": frames, "seconds": seconds, "frames_per_second": frames / seconds, "first_frame_seconds": first}


def _panel(shown: FrameSample, frames: int, seconds: float) -> Panel:
    pairs = zip(shown.frames, shown.numbers, strict=True)
    tiles = [Tile(pixels=frame, label=f"frame {number}") for frame, number in pairs]
    rows = [Row(tiles=tiles[start : start + 6]) for start in range(0, len(tiles), 6)]
    return Panel(title=f"{frames} frames in {seconds:.1f} s", rows=rows)


def main() -> None:
    """Runs the recipe."""
    config = tyro.cli(Config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks handle it
    speed = launch(on_rank, config.nproc, config)
    logging.info("%s: %s", config.out, ", ".join(f"{name} {value:.4g}" for name, value in speed.items()))


if __name__ == "__main__":
    main()
