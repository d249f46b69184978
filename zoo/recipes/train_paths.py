"""Teaches `sums` to think along up to eight paths and to answer from all of them, as ParaThinker does.

"make 64 from 3 7 25 6" -> "<think1>25-6=19, ...</think1>", "<think2>..." and so on, none of which sees another, then
"<summary>: yes. answer: (25-6)*3+7</summary>", which sees all. Paths are drafts of the shipped `sums` at temperature 1
without their verdict; three of four are wrong on countdowns. There are three stages:

1. `pool`: samples eight drafts of each of many training problems; writes `pool.json`, which all seeds share;
2. `train`: trains one model from one seed, with its thought embeddings; writes `paths-SEED.pt`;
3. `export`: its averaged weights so far become `export/SEED/`, a stock folder with `thoughts.safetensors`.

One model on one core:   OMP_NUM_THREADS=1 python zoo/recipes/train_paths.py --out runs/paths
Another one:             OMP_NUM_THREADS=1 python zoo/recipes/train_paths.py --out runs/paths --seed 1
What the paths gain:     python benchmarks/threads/paths.py --models runs/paths/export/0 runs/paths/export/1
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from partsong import zoo
from partsong.errors import ArgumentError
from partsong.knobs import Count
from partsong_zoo.sums.paths import MOST_PATHS, draw_texts, lesson_of, save_paths, widened
from partsong_zoo.sums.sampling import draft_pool
from partsong_zoo.sums.training import Attempts
from partsong_zoo.training.common import World, mixed_precision
from partsong_zoo.training.recipe import run_recipe
from partsong_zoo.training.stage import TrainingStage, inside_matrices, muon_and_adam, read_average, run_stages
from partsong_zoo.training.thread_training import ThreadLesson

STAGES: tuple[str, ...] = ("pool", "train", "export")
#: First integer of the keys of random draws.
TRAINING = 211


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/paths"  # The folder for everything that is written.
    stages: str = ",".join(STAGES)  # The stages to run, with commas between.
    seed: int = 0  # The seed of the training's draws.
    device: str = "cpu"  # Where to train: cpu or cuda.
    save_minutes: float = 2.0  # Minutes between checkpoints.
    problems: Count = 4000  # Problems that `pool` draws.
    steps: Count = 600  # Steps of `train`.
    minutes: float = math.inf  # Most minutes of `train`.
    tokens: Count = 2400  # Tokens per step.
    muon_rate: float = 3e-3  # Peak learning rate of orthogonalised momentum.
    adam_rate: float = 1.5e-3  # Peak learning rate of Adam.


def sample_pool(config: Config, world: World) -> None:
    """Runs stage 1, unless its file is there."""
    path = Path(config.out) / "pool.json"
    if path.exists():
        return
    pool = draft_pool(zoo.load("sums").model, config.problems, MOST_PATHS, seed=TRAINING)
    path.write_text(json.dumps([asdict(one) for one in pool]))
    world.say(f"{sum(len(one.drafts) for one in pool)} drafts of {len(pool)} problems")


def read_pool(config: Config) -> list[Attempts]:
    """Reads what stage 1 has written."""
    path = Path(config.out) / "pool.json"
    if not path.is_file():
        raise ArgumentError(f"no {path}; run the stage 'pool' first")
    return [Attempts(one["question"], one["solution"], tuple(one["drafts"])) for one in json.loads(path.read_text())]


def new_lesson() -> ThreadLesson:
    """Makes the model as it begins. Plain attention is the fastest on a CPU for rows this short."""
    model = widened(zoo.load("sums").model)
    model.set_attn_implementation("eager")
    return lesson_of(model)


def checkpoint(config: Config) -> Path:
    """Returns where the model's checkpoint is."""
    return Path(config.out) / f"paths-{config.seed}.pt"


def train(config: Config, world: World) -> None:
    """Runs stage 2."""
    pool = read_pool(config)
    lesson: Any = new_lesson().to(world.device).train()
    stage = TrainingStage(
        world,
        checkpoint(config),
        lesson,
        muon_and_adam(
            lesson, inside_matrices(lesson, "model.model.layers."), (config.muon_rate, config.adam_rate), 0.01
        ),
        key=(TRAINING, config.seed, world.rank),
        steps=config.steps,
        minutes=config.minutes,
        save_minutes=config.save_minutes,
    )

    def loss(rng: np.random.Generator) -> tuple[Tensor, str]:
        batch = draw_texts(random.Random(int(rng.integers(2**62))), pool, config.tokens).to(world.device)
        with mixed_precision(world):
            return lesson(batch), f"of {batch.num_tokens} tokens in {batch.ids.numel()} places"

    stage.run(loss)


def export(config: Config, world: World) -> None:
    """Runs stage 3."""
    if not checkpoint(config).exists():
        raise ArgumentError(f"no {checkpoint(config)}; run the stage 'train' first")
    lesson = new_lesson()
    lesson.load_state_dict(read_average(checkpoint(config)))
    save_paths(lesson, Path(config.out) / "export" / str(config.seed))


def run(config: Config, world: World) -> None:
    """Runs the stages of the configuration."""
    run_stages(config, world, {"pool": sample_pool, "train": train, "export": export})


def main() -> None:
    """Runs the recipe."""
    run_recipe(Config, __doc__, run)


if __name__ == "__main__":
    main()
