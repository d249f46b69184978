"""Samples a picture several times larger than the model was trained on, on several ranks, guided by a small picture.

The large picture is painted in overlapping patches of the training size (`StructureGuidance`), which the ranks share,
and decoded by all ranks together (`ParallelVae`). For comparison the plain pipeline paints the same size without
guidance. The recipe writes both pictures, a sheet with both and a report. Started again with the same options and
folder, it keeps the pictures that are done.

Four times the zoo's size:
    python recipes/highres_image.py --out runs/highres
The zoo's UNet, three times:
    python recipes/highres_image.py --model shapes-unet --factor 3
SDXL at 2048 x 2048 on two GPUs:
    python recipes/highres_image.py --model stabilityai/stable-diffusion-xl-base-1.0 --factor 2 --guidance 5 --steps 50
    --dtype float16 --nproc 2 --prompt "a lighthouse at dusk" --out runs/dusk
PixArt-Sigma at 2048 x 2048:
    python recipes/highres_image.py --model PixArt-alpha/PixArt-Sigma-XL-2-1024-MS --factor 2 --guidance 3 --steps 20
    --dtype float16 --nproc 2 --prompt "a lighthouse at dusk" --out runs/dusk

The patches need a lower guidance scale than usual, since each of them is painted for the whole prompt.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import tyro
from PIL import Image

from partsong import ParallelVae, StructureGuidance, zoo
from partsong.errors import ArgumentError
from partsong.evals.pictures.seams import seams
from partsong.evals.pictures.sheet import Panel, Row, Tile, draw_sheet
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.pipeline_source import find_pipeline
from partsong.jobs.pipelines import read_pipeline
from partsong.ledger import Ledger
from partsong.parallel import Mesh, mesh_for, parallelize
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.launch import launch
from partsong.progress import bar_settings
from partsong.samplers import generate


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    model: str = "shapes"  # A name of the zoo, a folder with an image pipeline, or its name on the hub.
    prompt: str = "a red circle left of a blue square"  # What the picture shows.
    out: str = "runs/highres"  # The folder for pictures and report.
    factor: int = 4  # How many times the training size.
    nproc: int = 2  # How many ranks there are.
    seed: int = 0  # The seed of the noise.
    steps: int = 28  # Denoising steps.
    guidance: float = 2.5  # Guidance scale.
    overlap: float = 0.25  # Share of a patch that overlaps the next.
    weight: float = 1.0  # Weight of the guide in the first step.
    until: float = 0.3  # Share of noise at which the guide ends.
    power: float = 0.0  # How the weight falls: 0 not at all, 1 in a straight line.
    mask: str = "none"  # Where it guides: none (everywhere) or attention.
    guide: str = "sample"  # What it guides: sample or prediction.
    dtype: str = "float32"  # The type of weights and arithmetic.


def load(config: Config) -> Any:
    """Loads the pipeline: one of the zoo, a folder, or one from the hub."""
    quiet_libraries()
    source = find_pipeline(config.model)
    pipe = zoo.complete(source.zoo_name, read_pipeline(source.folder, source.pipeline, config.dtype))
    pipe.set_progress_bar_config(**bar_settings("steps", unit="step"))
    return pipe


def call(config: Config, pipe: Any) -> dict[str, Any]:
    """Makes the arguments of the pipeline's call at full size."""
    defaults = dict(zoo.MODELS[config.model].defaults) if config.model in zoo.MODELS else {}
    denoiser = getattr(pipe, "transformer", None) or pipe.unet
    # Models like Flux, which take pictures of any size, leave it to their pipeline.
    trained = (denoiser.config.get("sample_size") or pipe.default_sample_size) * pipe.vae_scale_factor
    return defaults | {
        "prompt": config.prompt,
        "height": trained * config.factor,
        "width": trained * config.factor,
        "num_inference_steps": config.steps,
        "guidance_scale": config.guidance,
        "generator": torch.Generator().manual_seed(config.seed),
    }


def sample_guided(config: Config) -> dict[str, Any]:
    """Samples the guided picture; also returns its time, and what each rank sent and computed. Runs on every rank."""
    knobs = {
        field.name: getattr(config, field.name) for field in fields(StructureGuidance) if hasattr(config, field.name)
    }
    strategies = (StructureGuidance(**knobs), ParallelVae())
    with Mesh(**mesh_for(strategies, config.nproc), timeout=3600.0) as mesh:
        pipe = load(config).to(mesh.device)
        with parallelize(pipe, *strategies, mesh=mesh) as plan, Ledger() as ledger:
            start = time.perf_counter()
            image = generate(plan, **call(config, pipe)).images[0]
            seconds, spent = time.perf_counter() - start, ledger.summary()
            explained = str(plan.explain())
        everyone = mesh.axis(*mesh.degrees)
        rows = agree(everyone, [seconds, spent["bytes_sent"], spent["forwards"], spent["seconds_waiting"]])
    columns = [list(column) for column in zip(*rows, strict=True)]
    names = ("seconds", "bytes_sent", "forwards", "seconds_waiting")
    return {"image": image, "plan": explained.splitlines()} | dict(zip(names, columns, strict=True))


def sample_plain(config: Config) -> dict[str, Any]:
    """Samples the plain pipeline's picture of the same size; also returns its seconds."""
    pipe = load(config).to("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    image = pipe(**call(config, pipe)).images[0]
    return {"image": image, "seconds": [time.perf_counter() - start]}


def facts(config: Config, image: Image.Image) -> float | None:
    """Returns the share of the prompt's facts that the zoo's reader finds in the picture, scaled to its size."""
    if config.model not in zoo.MODELS:
        return None
    task, size = zoo.MODELS[config.model].task, zoo.MODELS[config.model].defaults["width"]
    return task.facts_read(config.prompt, image.resize((size, size), Image.Resampling.BOX))


def measured(config: Config, image: Image.Image) -> dict[str, Any]:
    """Returns what is measured of a picture."""
    return {"facts_read": facts(config, image), "border_jump_ratio": seams(image, config.factor)}


def done_before(config: Config) -> dict[str, dict[str, Any]]:
    """Returns what the report says of pictures that a run before this one has finished, by name.

    Raises:
        ArgumentError: the folder holds pictures of other settings.
    """
    path = Path(config.out) / "report.json"
    if not path.exists():
        return {}
    before = json.loads(path.read_text(encoding="utf-8"))
    other = [name for name, value in asdict(config).items() if before["config"].get(name) != value]
    if set(other) - {"out", "nproc"}:
        raise ArgumentError(f"{config.out} holds pictures with another {', '.join(other)}; give another --out")
    return before["pictures"]


def main() -> None:
    """Runs the recipe."""
    config = tyro.cli(Config, description=cast("str", __doc__).splitlines()[0])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    rows = done_before(config)
    for name in ("guided", "plain"):
        if name in rows:
            logging.info("%s.png is there already", name)
            continue
        row = launch(sample_guided, config.nproc, config) if name == "guided" else sample_plain(config)
        image = row.pop("image")
        image.save(out / f"{name}.png")
        rows[name] = {"size": list(image.size), **row, **measured(config, image)}
        filed = {"config": asdict(config), "pictures": rows}
        (out / "report.json").write_text(json.dumps(filed, indent=1) + "\n", encoding="utf-8")
        logging.info("%s: %s", name, json.dumps({key: value for key, value in rows[name].items() if key != "plan"}))
    tiles = [
        Tile(pixels=np.asarray(Image.open(out / f"{name}.png")), label=f"{name}, {max(row['seconds']):.1f} s")
        for name, row in rows.items()
    ]
    draw_sheet(config.model, [Panel(title=config.prompt, rows=[Row(tiles=tiles)])]).save(out / "sheet.png")


if __name__ == "__main__":
    try:
        main()
    except ArgumentError as error:
        raise SystemExit(f"error: {error}") from None
