"""Teaches `motion-causal` to continue blocks that are clean, as CascadePipeline shows them: `motion-clean`.

`motion-causal` reads a past at its own noise level. Self-Forcing and its kin read a past that is done. There are three
stages:

1. `train`: a copy makes clips in four steps, block after block or several blocks together as in a cascade of any
   depth, and they move to where `motion` finds them likelier than a model of such clips does (self-forcing);
2. `export`: the averaged weights so far become `export/motion-clean/`, also while stage 1 runs;
3. `evaluate`: samples fresh captions block after block and reads their facts back.

On one core:           OMP_NUM_THREADS=1 python zoo/recipes/train_motion_clean.py --out runs/motion-clean
Look while it trains:  python zoo/recipes/train_motion_clean.py --out runs/motion-clean --stages export,evaluate

Every step draws its captions, noise and moments from (seed, rank, step), so a stage that was stopped continues from its
checkpoint with exactly the steps it would have made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from partsong import CascadePipeline, generate, parallelize, zoo
from partsong.knobs import Share
from partsong_zoo.folders import begin_with, pipeline_to_begin_with, save_pipeline
from partsong_zoo.motion.clean_context import cascaded_clip, draw_cascade
from partsong_zoo.motion.forcing import Forcing
from partsong_zoo.motion.grammar import describe, training_scene
from partsong_zoo.motion.model import BLOCK, LATENT_CHANNELS, build_pipeline, token_ids
from partsong_zoo.motion.scoring import score
from partsong_zoo.motion.training import Animator, draw_noise
from partsong_zoo.training.common import World, mixed_precision
from partsong_zoo.training.recipe import file_report, run_recipe
from partsong_zoo.training.stage import TrainingStage, adam, read_average, run_stages

MODEL, NUM_STEPS = "motion-clean", 4


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/motion-clean"  # The folder for everything that is written.
    stages: str = "train,export,evaluate"  # The stages to run, with commas between.
    start: str = str(zoo.MODELS["motion-causal"].folder)  # The folder of `motion-causal`.
    teacher: str = str(zoo.MODELS["motion"].folder)  # The folder of `motion`.
    seed: int = 0  # The seed of all draws.
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # Where to train: cpu or cuda.
    save_minutes: float = 3.0  # Minutes between checkpoints.
    steps: int = 300  # Most steps of `train`.
    minutes: float = math.inf  # Most minutes of `train`.
    batch: int = 8  # Clips per step of all ranks.
    blocks: int = 4  # Blocks of a clip, four latents each.
    pairs: Share = 0.25  # Share of the captions that have two objects.
    heads: int = 6  # Attention heads.
    depth: int = 6  # Layers.
    rate: float = 5e-5  # The student's peak learning rate; its clips' model has four times that.
    guidance: float = 2.0  # The guidance of `motion`.
    captions: int = 60  # Fresh captions to evaluate.


def started(config: Config, folder: str, block: int) -> Animator:
    """Makes a model with a folder's weights, its text encoder fixed; causal unless `block` is 0."""
    pipeline = pipeline_to_begin_with(folder, "vae", "text_encoder", "transformer")
    model = Animator(config.heads, config.depth, block)
    begin_with(folder, model.text, pipeline.text_encoder)
    begin_with(folder, model.transformer, pipeline.transformer)
    model.text.requires_grad_(False)
    return model


def train(config: Config, world: World) -> None:
    """Runs stage 1; writes `clean.pt`."""
    torch.manual_seed(config.seed)
    student = started(config, config.start, BLOCK).to(world.device)
    teacher, fake = (started(config, config.teacher, 0).to(world.device) for _ in range(2))
    rates = (config.rate, 4 * config.rate)
    stage = TrainingStage(
        world,
        Path(config.out) / "clean.pt",
        nn.ModuleDict({"student": student, "fake": fake}),
        [adam(list(each.transformer.parameters()), r) for each, r in zip((student, fake), rates, strict=True)],
        key=(151, config.seed, world.rank),
        steps=config.steps,
        minutes=config.minutes,
        save_minutes=config.save_minutes,
    )
    num, forcing = (
        max(1, config.batch // world.size),
        Forcing(teacher=teacher.requires_grad_(False), guidance=config.guidance),
    )

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        captions = [describe(training_scene(rng, config.pairs), rng) for _ in range(num)]
        ids = token_ids(captions).to(world.device)
        noise = draw_noise(torch.empty(num, LATENT_CHANNELS, config.blocks * BLOCK, 8, 8, device=world.device), rng)
        with mixed_precision(world):
            clip = cascaded_clip(student, noise, ids, *draw_cascade(config.blocks, NUM_STEPS, rng))
            losses = forcing.losses(clip, fake, ids, rng)
        return losses[0] + losses[1], f"fake {losses[1]:.4f}"

    stage.run(loss_of)
    world.say(f"train done: {stage.step} steps, {stage.spent:.1f} minutes")


def exported(config: Config) -> Path:
    """Returns the folder that stage 2 writes."""
    return Path(config.out) / "export" / MODEL


def export(config: Config, world: World) -> None:
    """Runs stage 2: saves a stock pipeline folder."""
    if world.rank:
        return
    model = started(config, config.start, BLOCK)
    model.load_state_dict(read_average(Path(config.out) / "clean.pt", "student"))
    vae = pipeline_to_begin_with(config.start, "vae").vae
    save_pipeline(build_pipeline(model, vae), exported(config))


def evaluate(config: Config, world: World) -> None:
    """Runs stage 3: makes videos block after block, and writes the facts and frames that are read back."""
    if world.rank:
        return
    pipeline: Any = DiffusionPipeline.from_pretrained(exported(config)).to(world.device)
    pipeline.set_progress_bar_config(disable=True)
    knobs = dict(zoo.MODELS["motion-causal"].defaults)
    with parallelize(pipeline, CascadePipeline(depth=1)) as plan:

        def call(texts: list[str], **named: Any) -> Any:
            return generate(plan, prompt=texts, **named)

        sampler: Any = call
        result = score(sampler, config.captions, seed=config.seed, **knobs)
    file_report(Path(config.out) / "facts.json", {"captions": config.captions, **knobs, **result.report()})
    result.save_sheet(Path(config.out) / "samples.png")


def run(config: Config, world: World) -> None:
    """Runs the stages of the configuration."""
    for folder, block in ((config.start, BLOCK), (config.teacher, 0)):
        started(config, folder, block)  # A wrong folder ends here, before any work.
    run_stages(config, world, {"train": train, "export": export, "evaluate": evaluate})


def main() -> None:
    """Runs the recipe."""
    run_recipe(Config, __doc__, run)


if __name__ == "__main__":
    main()
