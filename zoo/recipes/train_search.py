"""Trains a small model to answer directly, or to write a search with its dead ends first: countdowns or sudokus.

"make 69 from 2 11 12", directly: "11+12=23, ..."; as a search: every step that is tried, "!" where one misses the
target, and "<" for the way back. In a sudoku "a13" is a 3 in row a. A direct answer fills the empty
cells line by line; a search goes the same way, but tries one possible digit after another, and marks guesses ("?"),
dead ends ("!") and the way back ("-").

Each run trains one model, and a step of all has as many tokens, so that equal steps are equal computing:

    for task in countdown sudoku-4; do for way in direct search; do
        OMP_NUM_THREADS=1 python zoo/recipes/train_search.py --task $task --way $way --out runs/search
    done; done

Sudokus of 6 x 6 cells (`sudoku-6`) take more: 600 steps did not teach a search which digits are possible.

There are three stages: `train`; `export`, which writes the averaged weights as a stock folder `export/TASK-WAY/`; and
`evaluate`, which answers fresh problems greedily. `benchmarks/thinking/backtrack.py` compares the models.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong_zoo.folders import load_folder
from partsong_zoo.search.model import LANGUAGES, build_model, save_model
from partsong_zoo.search.problems import TASKS
from partsong_zoo.search.training import Way, draw_batches, mean_loss
from partsong_zoo.sums.sampling import sample
from partsong_zoo.training.common import World, mixed_precision
from partsong_zoo.training.recipe import file_report, run_recipe
from partsong_zoo.training.stage import TrainingStage, inside_matrices, muon_and_adam, read_average, run_stages

STAGES: tuple[str, ...] = ("train", "export", "evaluate")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/search"  # The folder for everything that is written.
    stages: str = ",".join(STAGES)  # The stages to run, with commas between.
    task: Literal["countdown", "sudoku-4", "sudoku-6"] = "sudoku-4"  # The kind of problems.
    way: Way = "search"  # What the model writes.
    seed: int = 0  # The seed of all draws.
    device: str = "cpu"  # Where to train: cpu or cuda.
    save_minutes: float = 2.0  # Minutes between checkpoints.
    steps: int = 700  # Steps.
    minutes: float = math.inf  # Most minutes.
    tokens: int = 2400  # Tokens per step.
    heads: int = 4  # Attention heads.
    depth: int = 6  # Layers.
    muon_rate: float = 6e-3  # Peak learning rate of orthogonalised momentum.
    adam_rate: float = 3e-3  # Peak learning rate of Adam.
    problems: int = 200  # Fresh problems to evaluate.


def new_model(config: Config) -> LlamaForCausalLM:
    """Makes a model of random weights. Plain attention is the fastest on a CPU for rows this short."""
    torch.manual_seed(config.seed)
    model = build_model(config.task, config.heads, config.depth)
    model.set_attn_implementation("eager")
    return model


def checkpoint(config: Config) -> Path:
    """Returns where the model's checkpoint is."""
    return Path(config.out) / f"{config.task}-{config.way}.pt"


def folder(config: Config) -> Path:
    """Returns where the model's stock folder is."""
    return Path(config.out) / "export" / checkpoint(config).stem


def train(config: Config, world: World) -> None:
    """Runs stage 1."""
    model: Any = new_model(config)
    model = model.to(world.device).train()
    stage = TrainingStage(
        world,
        checkpoint(config),
        model,
        muon_and_adam(model, inside_matrices(model), (config.muon_rate, config.adam_rate), 0.01),
        key=(config.seed, world.rank),
        steps=config.steps,
        minutes=config.minutes,
        save_minutes=config.save_minutes,
    )

    def loss(rng: np.random.Generator) -> tuple[Tensor, str]:
        batches = draw_batches(config.task, random.Random(int(rng.integers(2**62))), config.way, config.tokens)
        with mixed_precision(world):
            mean = mean_loss(model, [batch.to(world.device) for batch in batches])
        return mean, f"of {sum(len(batch.ids) for batch in batches)} texts"

    stage.run(loss)


def export(config: Config, world: World) -> None:
    """Runs stage 2."""
    if not checkpoint(config).exists():
        raise ArgumentError(f"no {checkpoint(config)}; run the stage 'train' first")
    model = new_model(config)
    model.load_state_dict(read_average(checkpoint(config)))
    save_model(config.task, model, folder(config))


def evaluate(config: Config, world: World) -> None:
    """Runs stage 3: writes `scores-TASK-WAY.json`."""
    task, model = TASKS[config.task], load_folder(folder(config))
    fresh = task.fresh(config.problems, config.seed + 1)
    texts = sample(model, [one.question for one in fresh], seed=None, most=task.most, words=LANGUAGES[config.task])
    pairs = [*zip(fresh, texts, strict=True)]
    report = {
        "task": config.task,
        "way": config.way,
        "right": sum(task.is_right(one.question, text.text) for one, text in pairs) / len(pairs),
        "finished": sum(text.finished for text in texts) / len(texts),
        "tokens": sum(text.written for text in texts) / len(texts),
    }
    file_report(Path(config.out) / f"scores-{config.task}-{config.way}.json", report)


def run(config: Config, world: World) -> None:
    """Runs the stages of the configuration."""
    run_stages(config, world, {"train": train, "export": export, "evaluate": evaluate})


def main() -> None:
    """Runs the recipe."""
    run_recipe(Config, __doc__, run)


if __name__ == "__main__":
    main()
