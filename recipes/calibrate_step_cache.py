"""Calibrates the measures `input` and `magnitude` of `StepCache` for a model of the zoo, and stores them with it.

Run on one core, in two minutes:    python recipes/calibrate_step_cache.py --model shapes

It samples captions that no benchmark uses, in full, and fits how far the output changes from step to step to how far
the modulated input of the first block does; the file goes into the folder of the model's weights. For a model of your
own, call `partsong.evals.cache_calibration.calibrate` and `write_calibrations` as below.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from partsong import zoo
from partsong.evals.cache_calibration import calibrate
from partsong.parallel.step_cache.tables import FILE_NAME, read_calibrations, write_calibrations
from partsong.seeds import generators


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to calibrate."""

    model: str = "shapes"
    """A model of the zoo that makes pictures or videos."""
    steps: int | None = None
    """Number of steps; None takes the model's own."""
    captions: int = 16
    """How many captions to sample."""
    seed: int = 7000
    """Seed of captions and noise."""
    degree: int = 4
    """Degree of the polynomial."""
    out: Path | None = None
    """The file to write; None takes the folder of the weights. Other numbers of steps in it are kept."""


def main(config: Config) -> None:
    """Calibrates and writes the file."""
    torch.set_num_threads(1)
    row, pipe = zoo.MODELS[config.model], zoo.load(config.model)
    pipe.set_progress_bar_config(disable=True)
    steps = config.steps or row.defaults["num_inference_steps"]
    asked: dict[str, Any] = {**row.defaults, "num_inference_steps": steps, "output_type": "latent"}
    captions, draws = row.task.captions(config.captions, config.seed), generators(config.seed, config.captions)
    calls = [asked | {"prompt": one, "generator": draw} for one, draw in zip(captions, draws, strict=True)]
    path = config.out or row.folder / FILE_NAME
    known = read_calibrations(path) if path.is_file() else {}
    known[steps] = calibrate(pipe, calls, degree=config.degree)
    command = " ".join(["python", "recipes/calibrate_step_cache.py", *sys.argv[1:]])
    write_calibrations(path, known, model=config.model, command=command)
    print(path, known[steps])


if __name__ == "__main__":
    main(tyro.cli(Config))
