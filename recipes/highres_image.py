"""Samples a picture several times larger than the model was trained on, on several ranks, guided by a small picture.

The large picture is painted in overlapping patches of the training size (`StructureGuidance`), dealt out over the
ranks, and decoded by all of them together (`ParallelVae`). For comparison the plain pipeline is called at the same
size: what the model makes of it without guidance. Three files are written: both pictures and a report.

Four times the zoo's size:   python recipes/highres_image.py --out runs/highres
The zoo's UNet, three times: python recipes/highres_image.py --model shapes-unet --factor 3
A real SDXL or SD3 folder:   python recipes/highres_image.py --model PATH --factor 2 --guidance 7 --prompt "..."

A guidance scale lower than usual suits the patches: each of them is told to hold the whole prompt.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from PIL import Image

from partsong import ParallelVae, StructureGuidance, zoo
from partsong.ledger import Ledger
from partsong.parallel import Mesh, mesh_for, parallelize
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.launch import launch
from partsong.samplers import generate


@dataclass(frozen=True, kw_only=True)
class Config:
    """The knobs of the recipe; every field is also a command-line flag."""

    model: str = "shapes"
    prompt: str = "a red circle left of a blue square"
    out: str = "runs/highres"
    factor: int = 4
    nproc: int = 2
    seed: int = 0
    steps: int = 28
    guidance: float = 2.5
    overlap: float = 0.25
    weight: float = 1.0
    until: float = 0.3
    power: float = 0.0
    mask: str = "none"
    guide: str = "sample"
    dtype: str = "float32"


def load(config: Config) -> Any:
    """The pipeline: one of the zoo, or any folder."""
    diffusers_logging.disable_progress_bar()
    diffusers_logging.set_verbosity_error()
    dtype = getattr(torch, config.dtype)
    if config.model in zoo.MODELS:
        pipe: Any = zoo.load(config.model, dtype)
    else:
        pipe = DiffusionPipeline.from_pretrained(
            config.model, torch_dtype=dtype, local_files_only=True, use_safetensors=True
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(config: Config, pipe: Any) -> dict[str, Any]:
    """The call of the pipeline at full size."""
    defaults = dict(zoo.MODELS[config.model].defaults) if config.model in zoo.MODELS else {}
    trained = (getattr(pipe, "transformer", None) or pipe.unet).config.sample_size * pipe.vae_scale_factor
    return defaults | {
        "prompt": config.prompt,
        "height": trained * config.factor,
        "width": trained * config.factor,
        "num_inference_steps": config.steps,
        "guidance_scale": config.guidance,
        "generator": torch.Generator().manual_seed(config.seed),
    }


def guided(config: Config) -> dict[str, Any]:
    """On every rank: the guided picture, its time, and what each rank sent and computed."""
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
            said = str(plan.explain())
        everyone = mesh.axis(*mesh.degrees)
        rows = agree(everyone, [seconds, spent["bytes_sent"], spent["forwards"], spent["seconds_waiting"]])
    columns = [list(column) for column in zip(*rows, strict=True)]
    names = ("seconds", "bytes_sent", "forwards", "seconds_waiting")
    return {"image": image, "plan": said.splitlines()} | dict(zip(names, columns, strict=True))


def plain(config: Config) -> tuple[Image.Image, float]:
    """The plain pipeline's picture of the same size, and its seconds."""
    pipe = load(config).to("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    return pipe(**call(config, pipe)).images[0], time.perf_counter() - start


def facts(config: Config, image: Image.Image) -> float | None:
    """The share of the prompt's facts that the zoo's reader finds in the picture, scaled to the size it reads."""
    if config.model not in zoo.MODELS:
        return None
    task, size = zoo.MODELS[config.model].task, zoo.MODELS[config.model].defaults["width"]
    return task.facts_read(config.prompt, image.resize((size, size), Image.Resampling.BOX))


def seams(image: Image.Image, factor: int) -> float:
    """How much more neighbouring pixels differ where training sizes meet than elsewhere; about 1 without seams."""
    pixels = np.asarray(image, dtype=np.float64)
    inside, across = [], []
    for axis in (0, 1):
        jumps = np.abs(np.diff(pixels, axis=axis)).mean(axis=(1 - axis, 2))
        meets = (np.arange(len(jumps)) + 1) % (pixels.shape[axis] // factor) == 0
        inside.append(jumps[~meets])
        across.append(jumps[meets])
    return float(np.concatenate(across).mean() / np.concatenate(inside).mean())


def main() -> None:
    """Runs the recipe."""
    parser = argparse.ArgumentParser(description=cast("str", __doc__).splitlines()[0])
    for field in fields(Config):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    config = Config(**vars(parser.parse_args()))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    report = launch(guided, config.nproc, config)
    image = report.pop("image")
    image.save(out / "guided.png")
    unguided, seconds = plain(config)
    unguided.save(out / "plain.png")
    report |= {
        "config": asdict(config),
        "size": list(image.size),
        "seconds_plain": seconds,
        "facts_read": facts(config, image),
        "facts_read_plain": facts(config, unguided),
        "border_jump_ratio": seams(image, config.factor),
        "border_jump_ratio_plain": seams(unguided, config.factor),
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    logging.info("%s", json.dumps({key: value for key, value in report.items() if key not in ("config", "plan")}))


if __name__ == "__main__":
    main()
