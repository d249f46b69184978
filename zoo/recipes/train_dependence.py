"""Trains a head that predicts how much one token of an answer of `lists-mdlm` tells about another.

The rule `variation-bound` decides as many tokens at once as the head's predictions allow (DEMASK, arXiv 2604.02560).
The model itself stays as it is. There are three stages:

1. `train`: masked places of drawn answers are filled one at a time, and the head learns how far that changes the
   model's distributions at the others;
2. `export`: the averaged weights so far become `export/lists-mdlm/dependence/`, also while stage 1 runs;
3. `evaluate`: compares predictions with measured changes on fresh answers.

On one core:            OMP_NUM_THREADS=1 python zoo/recipes/train_dependence.py --out runs/dependence
Look while it trains:   python zoo/recipes/train_dependence.py --out runs/dependence --stages export,evaluate

Every step draws its answers, masks and tokens from (seed, step), so a stage that was stopped continues from its
checkpoint with exactly the steps it would have made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from partsong import zoo
from partsong.errors import ArgumentError
from partsong.samplers.text.dependence.folders import load_dependence, save_dependence
from partsong.samplers.text.dependence.head import DependenceHead, DependenceSettings
from partsong_zoo.lists.dependence import dependence_loss, measure_changes, predicted_changes
from partsong_zoo.lists.training import draw_batch
from partsong_zoo.shapes.scenes import generator
from partsong_zoo.training.common import World
from partsong_zoo.training.recipe import file_report, run_recipe
from partsong_zoo.training.stage import TrainingStage, adam, read_average, run_stages

MODEL = "lists-mdlm"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/dependence"  # The folder for everything that is written.
    stages: str = "train,export,evaluate"  # The stages to run, with commas between.
    seed: int = 0  # The seed of all draws.
    device: str = "cpu"  # Where to train: cpu or cuda.
    save_minutes: float = 2.0  # Minutes between checkpoints.
    width: int = 96  # Features of a position.
    rank: int = 32  # Numbers that two positions are compared by.
    steps: int = 800  # Most steps of `train`.
    minutes: float = math.inf  # Most minutes of `train`.
    batch: int = 96  # Answers per step.
    fills: int = 96  # Places of them that are filled, one at a time.
    rate: float = 3e-3  # Peak learning rate.
    answers: int = 200  # Fresh answers to evaluate.
    draws: int = 32  # Tokens drawn for each of their places.


def frozen_model(world: World) -> LlamaForCausalLM:
    """Loads the model. Plain attention is the fastest on a CPU for rows this short."""
    model: Any = zoo.load(MODEL).model
    model.set_attn_implementation("eager")
    return model.requires_grad_(False).to(world.device)


def new_head(config: Config, model: LlamaForCausalLM) -> DependenceHead:
    """Makes an untrained head."""
    torch.manual_seed(config.seed)
    sizes = {"hidden_size": model.config.hidden_size, "vocab_size": model.config.vocab_size}
    return DependenceHead(DependenceSettings(**sizes, width=config.width, rank=config.rank)).to(model.device)


def train(config: Config, world: World) -> None:
    """Runs stage 1, which writes `dependence.pt`."""
    model = frozen_model(world)
    head = new_head(config, model)
    stage = TrainingStage(
        world,
        Path(config.out) / "dependence.pt",
        head,
        [adam(list(head.parameters()), config.rate, decay=0.01)],
        key=(141, config.seed, world.rank),
        steps=config.steps,
        minutes=config.minutes,
        save_minutes=config.save_minutes,
    )

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        batch = draw_batch(rng, config.batch, fill=True, late=True)
        changes = measure_changes(model, batch, rng, config.fills)
        loss, counts = dependence_loss(head, changes), changes.counts
        with torch.no_grad():
            means = [float(each[counts].mean()) for each in (changes.variation, predicted_changes(head, changes))]
        return loss, f"measured {means[0]:.3f}, predicted {means[1]:.3f}, {int(counts.sum())} pairs"

    stage.run(loss_of)
    world.say(f"head done: {stage.step} steps, {stage.spent:.1f} minutes")


def exported(config: Config) -> Path:
    """Returns the folder that stage 2 writes."""
    return Path(config.out) / "export" / MODEL / "dependence"


def export(config: Config, world: World) -> None:
    """Runs stage 2: saves the averaged weights."""
    path = Path(config.out) / "dependence.pt"
    if not path.is_file():
        raise ArgumentError(f"no {path}; run the stage 'train' first")
    head = new_head(config, frozen_model(world))
    head.load_state_dict(read_average(path))
    save_dependence(head, exported(config))


def evaluate(config: Config, world: World) -> None:
    """Runs stage 3: measures the head in `export/` on fresh answers; writes `scores.json`."""
    model, head = frozen_model(world), load_dependence(exported(config)).to(world.device)
    rng = generator(142, config.seed)
    batch = draw_batch(rng, config.answers, fill=True, late=True)
    changes = measure_changes(model, batch, rng, config.fills, draws=config.draws)
    truth, guess = changes.variation[changes.counts], predicted_changes(head, changes)[changes.counts]
    report: dict[str, Any] = {"model": MODEL, "pairs": len(truth), "draws": config.draws}
    report |= {"measured": float(truth.mean()), "predicted": float(guess.mean())}
    report |= {"error": float((guess - truth).abs().mean()), "correlation": correlation(guess, truth)}
    file_report(Path(config.out) / "scores.json", report)


def correlation(a: Tensor, b: Tensor) -> float:
    """Returns the correlation of two lists of numbers."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def run(config: Config, world: World) -> None:
    """Runs the stages of the configuration."""
    run_stages(config, world, {"train": train, "export": export, "evaluate": evaluate})


def main() -> None:
    """Runs the recipe."""
    run_recipe(Config, __doc__, run)


if __name__ == "__main__":
    main()
