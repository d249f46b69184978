"""Makes a video ten times as long as the model's training videos, by every method, and compares them.

Sliding windows on one process are the serial way. `ClipParallel` gives each rank a part of the frames, `DualParallel`
sends blocks of frames through layers, and `TimestepPipeline` streams blocks of a causal model through denoising steps.
All three make the same video on any number of ranks. Each method writes a video. A sheet shows frames of all videos.
A report has time, memory, bytes and, for the zoo, the caption's facts read from the video.

Started again with the same options and folder, it keeps the methods that are done; `dual` and `timestep` go on where
they were stopped.

The zoo's models:
    python recipes/long_video.py --out runs/long
Wan 2.1 on four GPUs, 50 seconds:
    python recipes/long_video.py --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --methods dual clip --frames 801 --window 21
    --height 480 --width 832 --guidance 5 --dtype bfloat16 --nproc 4 --prompt "a lighthouse at dusk" --out runs/dusk
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
from PIL import Image

from partsong import ClipParallel, DualParallel, TimestepPipeline, parse_strategy, zoo
from partsong.errors import ArgumentError
from partsong.evals.pictures.sheet import Panel, Row, Tile, draw_sheet
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.compare import gather
from partsong.jobs.pipeline_source import find_pipeline
from partsong.jobs.pipelines import read_pipeline
from partsong.jobs.video_run import VideoRun, sample_video
from partsong.ledger import Ledger
from partsong.outputs import rgb_bytes
from partsong.parallel import Mesh, mesh_for, parallelize
from partsong.parallel.ranks.launch import launch
from partsong.progress import bar_settings
from partsong.samplers.long_video.sliding_windows import sliding_windows
from partsong.videos import FrameSample, VideoWriter

Method = Literal["windows", "clip", "dual", "timestep"]
#: Methods that keep their progress.
KEEP_JOURNALS = ("dual", "timestep")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    prompt: str = "a big red circle bounces left and right, a small blue square moves up"
    """What the video shows."""
    model: str = "motion"
    """A name of the zoo, a folder with a video pipeline, or its name on the hub."""
    causal: str = "motion-causal"
    """The same for `timestep`, whose model must see only the past."""
    methods: tuple[Method, ...] = ("windows", "clip", "dual", "timestep")
    """The methods to run, in order."""
    frames: int = 319
    """How many frames the video has; the zoo's models were trained on 31."""
    window: int = 16
    """How many latent frames a training video has."""
    nproc: int = 2
    """How many ranks there are."""
    previous: Literal["cached", "recomputed"] = "cached"
    """How `dual` sees the block before: keys that are kept take memory, frames computed again take time."""
    beside: tuple[str, ...] = ()
    """Strategies beside each method, as on a command line: encode-once, parallel-vae."""
    out: Path = Path("runs/long")
    """The folder for videos, sheet and report."""
    seed: int = 0
    """The seed of the noise."""
    steps: int | None = None
    """Denoising steps. Default: the model's own."""
    guidance: float | None = None
    """Guidance scale. Default: the model's own."""
    height: int | None = None
    """Height in pixels. Default: the model's own."""
    width: int | None = None
    """Width in pixels. Default: the model's own."""
    fps: float = 16.0
    """Frames per second of the videos."""
    dtype: str = "float32"
    """The type of weights and arithmetic."""

    def settings(self) -> dict[str, str]:
        """Returns what decides how the videos look."""
        apart = ("methods", "nproc", "beside", "out", "fps")
        return {name: str(value) for name, value in asdict(self).items() if name not in apart}


def strategy_of(config: Config, method: str) -> Any:
    """Makes the strategy of a method; None for windows on one process."""
    half = config.window // 2
    return {
        "clip": ClipParallel(window=half),
        "dual": DualParallel(block_frames=half, context=half, previous=config.previous),
        "timestep": TimestepPipeline(),
    }.get(method)


def load(config: Config, method: str) -> tuple[Any, dict[str, Any]]:
    """Loads the pipeline and makes the arguments of its call."""
    source = find_pipeline(config.causal if method == "timestep" else config.model)
    pipe = zoo.complete(source.zoo_name, read_pipeline(source.folder, source.pipeline, config.dtype))
    chosen: dict[str, Any] = {"height": config.height, "width": config.width}
    if method != "timestep":  # a few-step model keeps its own defaults: these are for the other model
        chosen |= {"num_inference_steps": config.steps, "guidance_scale": config.guidance}
    named = source.defaults | {key: value for key, value in chosen.items() if value is not None}
    named |= {"prompt": config.prompt, "num_frames": config.frames}
    return pipe, {**named, "generator": torch.Generator().manual_seed(config.seed)}


class Watched(VideoWriter):
    """Writes a video, says how many frames are done, and keeps some for the sheet."""

    def __init__(self, path: Path, method: str, total: int, fps: float) -> None:
        super().__init__(path, fps=fps)
        self.method, self.total, self.shown = method, total, FrameSample(12)

    def append(self, frames: Any) -> None:
        """Writes the next frames."""
        super().append(frames)
        self.shown.append([rgb_bytes(frame) for frame in frames])
        logging.info("%s: %d of %d frames", self.method, self.frames, self.total)


def on_rank(config: Config, method: str) -> dict[str, Any]:
    """Runs one method on this rank; the first rank returns its measurements."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    quiet_libraries()
    torch.set_num_threads(1 if config.nproc > 1 else torch.get_num_threads())
    strategy, world = strategy_of(config, method), int(os.environ.get("WORLD_SIZE", "1"))
    journal = config.out / f"{method}.journal" if method in KEEP_JOURNALS else None
    degrees: dict[str, Any] = mesh_for((strategy,), world) if strategy else {}
    with Mesh(**degrees, timeout=3600.0) as mesh:
        pipe, named = load(config, method)
        pipe.to(mesh.device).set_progress_bar_config(**bar_settings("steps", unit="step"))
        path = config.out / f"{method}.mp4"
        writer = Watched(path, method, config.frames, config.fps) if mesh.is_main else None
        keeps = mesh.is_main and config.model in zoo.MODELS  # only the zoo's readers look at all frames
        with Ledger(flops=False) as ledger:
            if strategy is None:
                run = sample_video(
                    lambda **call: sliding_windows(pipe, window=config.window, **call),
                    named, writer=writer, keeps=keeps,
                )  # fmt: skip
            else:
                with parallelize(pipe, strategy, *map(parse_strategy, config.beside), mesh=mesh) as plan:
                    run = sample_video(plan, named, journal=journal, writer=writer, keeps=keeps)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
        if mesh.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(mesh.device) / 2**20
        ranks = gather(mesh, [ledger.summary().get("bytes_sent", 0.0), peak], "end of a method")
        if writer is None:
            return {}
        Image.fromarray(np.concatenate(writer.shown.frames, axis=1)).save(config.out / f"{method}.png")
        return report(config, method, run, ranks) | {"shown": writer.shown.numbers}


def report(config: Config, method: str, run: VideoRun, ranks: list[list[float]]) -> dict[str, Any]:
    """Reports the measurements of a method."""
    name = config.causal if method == "timestep" else config.model
    row: dict[str, Any] = {
        "method": method,
        "model": name,
        "nproc": len(ranks),
        "frames": run.num_frames,
        "seconds": round(run.seconds, 2),
        "first_frame_seconds": round(run.first, 2),
        "frames_per_second": round(run.num_frames / run.seconds, 2),
        "bytes_sent": [int(sent) for sent, _ in ranks],
        "peak_memory_mb": [round(peak) for _, peak in ranks],
    }
    if run.frames and name in zoo.MODELS:
        task, video = zoo.MODELS[name].task, np.concatenate(run.frames)
        row["facts_read"] = task.facts_read(config.prompt, video)
        if row["facts_read"] is not None:
            row["identity_kept"] = task.identity_kept(config.prompt, video)
    return row


def panel(config: Config, row: dict[str, Any]) -> Panel:
    """Shows the frames that were kept of a method."""
    frames = np.split(np.asarray(Image.open(config.out / f"{row['method']}.png")), len(row["shown"]), axis=1)
    tiles = [Tile(pixels=frame, label=f"frame {number}") for frame, number in zip(frames, row["shown"], strict=True)]
    halves = [Row(tiles=tiles[start : start + 6]) for start in range(0, len(tiles), 6)]
    ranks = f"{row['nproc']} rank{'s' * (row['nproc'] > 1)}"
    return Panel(title=f"{row['method']}, {ranks}, {row['seconds']:.1f} s", rows=halves)


def done_before(config: Config) -> dict[str, dict[str, Any]]:
    """Returns the methods that a run before this one has finished, by name.

    Raises:
        ArgumentError: the folder holds videos of other settings.
    """
    path = config.out / "report.json"
    if not path.exists():
        return {}
    before = json.loads(path.read_text(encoding="utf-8"))
    if before["config"] != config.settings():
        other = [name for name, value in config.settings().items() if before["config"].get(name) != value]
        raise ArgumentError(f"{config.out} holds videos with another {', '.join(other)}; give another --out")
    return {row["method"]: row for row in before["rows"]}


def main() -> None:
    """Runs the recipe."""
    config = tyro.cli(Config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    config.out.mkdir(parents=True, exist_ok=True)
    rows = done_before(config)
    for method in config.methods:
        if method in rows:
            logging.info("%s is done already", method)
            continue
        rows[method] = launch(on_rank, 1 if method == "windows" else config.nproc, config, method)
        logging.info(", ".join(f"{name} {value}" for name, value in rows[method].items() if name != "shown"))
        filed = {"config": config.settings(), "rows": list(rows.values())}
        (config.out / "report.json").write_text(json.dumps(filed, indent=1) + "\n", encoding="utf-8")
    shown = [panel(config, rows[method]) for method in config.methods]
    draw_sheet(config.prompt, shown).save(config.out / "sheet.png")
    logging.info("%s: videos, sheet.png and report.json", config.out)


if __name__ == "__main__":
    try:
        main()
    except ArgumentError as error:
        raise SystemExit(f"error: {error}") from None
