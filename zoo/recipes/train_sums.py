"""Trains `sums`, the zoo's small reasoning model, from nothing: sums and countdowns worked out in steps.

"37+48-19*3=?" -> "19*3=57, 37+48=85, 85-57=28. answer: 28"
"make 64 from 3 7 25 6" -> "25-6=19, 19*3=57, 57+7=64: yes. answer: (25-6)*3+7", or other steps that end ": no."

The result is a stock Llama folder with a tokenizer and a chat template. There are six stages:

1. `drafts`: the model learns solutions, and to compute honestly even if the steps lead nowhere; at first only large
   problems are shown;
2. `samples`: samples eight drafts of each of many new training problems, at temperature 1;
3. `refine`: the model goes on, and in most steps reads drafts after a problem. They are its own or invented, right or
   wrong, at first one, then up to four. It repeats the end of a right one or solves the problem anew. It also lists
   what drafts have found;
4. `polish`: the same with more first drafts, which it has partly unlearned by then;
5. `export`: the averaged weights so far become `export/sums/`, also while stages run;
6. `evaluate`: measures single samples, votes, refinement and Parallel-Distill-Refine on problems it has never seen.

Run on one core:             OMP_NUM_THREADS=1 python zoo/recipes/train_sums.py --out runs/sums
Look at it while it trains:  python zoo/recipes/train_sums.py --out runs/sums --stages export,evaluate
Continue from a folder:      python zoo/recipes/train_sums.py --out runs/sums --start DIR --stages samples,polish,export

Every step draws its data from (seed, step), so a stage that was stopped continues from its checkpoint with exactly the
steps it would have made, on one core to the last bit. A stage ends at its number of steps, or at its minutes if they
are set and come first (then the clock decides, and no two runs are the same). Its learning rate falls to zero by then.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong_zoo.folders import begin_with, load_folder
from partsong_zoo.sums.model import build_model, save_model
from partsong_zoo.sums.sampling import draft_pool
from partsong_zoo.sums.scoring import report
from partsong_zoo.sums.training import Attempts, draw_batch, loss_of
from partsong_zoo.training.common import World, mixed_precision
from partsong_zoo.training.recipe import file_report, run_recipe
from partsong_zoo.training.stage import TrainingStage, inside_matrices, muon_and_adam, read_average, stages_of

STAGES: tuple[str, ...] = ("drafts", "samples", "refine", "polish", "export", "evaluate")
TRAINED: tuple[Literal["drafts", "refine", "polish"], ...] = ("drafts", "refine", "polish")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/sums"  # The folder for everything that is written.
    stages: str = ",".join(STAGES)  # The stages to run, with commas between.
    seed: int = 0  # The seed of all draws.
    device: str = "cpu"  # Where to train: cpu or cuda.
    save_minutes: float = 2.0  # Minutes between checkpoints.
    start: str = ""  # A folder of the same sizes that stands for stages without a checkpoint, to train it on.
    drafts_steps: int = 1800  # Most steps of stage `drafts`.
    drafts_minutes: float = math.inf  # Most minutes of stage `drafts`.
    large_steps: int = 986  # First steps of `drafts` with large problems only.
    pool: int = 800  # Problems that `samples` draws.
    pool_drafts: int = 8  # Drafts of each.
    refine_steps: int = 700  # Most steps of stage `refine`.
    single_steps: int = 150  # First steps of `refine` with a single draft.
    refine_minutes: float = math.inf  # Most minutes of stage `refine`.
    polish_steps: int = 1200  # Most steps of stage `polish`.
    polish_minutes: float = math.inf  # Most minutes of stage `polish`.
    batch: int = 64  # Rows per step.
    heads: int = 5  # Attention heads.
    depth: int = 6  # Layers.
    muon_rate: float = 6e-3  # Peak learning rate of orthogonalised momentum.
    adam_rate: float = 3e-3  # Peak learning rate of Adam.
    problems: int = 500  # Problems per family to evaluate.


def new_model(config: Config) -> LlamaForCausalLM:
    """Makes a model of random weights. Plain attention is the fastest on a CPU for rows this short."""
    torch.manual_seed(config.seed)
    model = build_model(config.heads, config.depth)
    model.set_attn_implementation("eager")
    return model


def started_model(config: Config) -> LlamaForCausalLM:
    """Makes the model with the weights of the folder to begin with."""
    model = new_model(config)
    begin_with(config.start, model, load_folder(Path(config.start)))
    return model.eval()


def load_average(config: Config, kind: str) -> LlamaForCausalLM:
    """Loads the averaged weights of a stage's checkpoint, or the model to begin with if it has none, on the CPU."""
    path = Path(config.out) / f"{kind}.pt"
    if config.start and not path.exists():
        return started_model(config)
    if not path.exists():
        raise ArgumentError(f"no {path}; run the stage {kind!r} first")
    model = new_model(config)
    model.load_state_dict(read_average(path))
    return model.eval()


def train(config: Config, world: World, kind: Literal["drafts", "refine", "polish"]) -> TrainingStage:
    """Runs stage 1, 3 or 4, which write `drafts.pt`, `refine.pt` and `polish.pt`."""
    out, place = Path(config.out), TRAINED.index(kind)
    model: Any = load_average(config, TRAINED[place - 1]) if place else new_model(config)
    model = model.to(world.device).train()
    pool = read_pool(out / "pool.json") if place else []
    # The model should not lose what it knows by then.
    scale = 2 / 3 if kind == "polish" else 1.0
    stage = TrainingStage(
        world,
        out / f"{kind}.pt",
        model,
        muon_and_adam(model, inside_matrices(model), (scale * config.muon_rate, scale * config.adam_rate), 0.01),
        key=(place + 91, config.seed, world.rank),
        steps=getattr(config, f"{kind}_steps"),
        minutes=getattr(config, f"{kind}_minutes"),
        save_minutes=config.save_minutes,
    )
    early = {"drafts": config.large_steps, "refine": config.single_steps}.get(kind, 0)

    def loss(rng: np.random.Generator) -> tuple[Tensor, str]:
        lesson = {"drafts": "first", "refine": "single" if stage.step < early else "several"}.get(kind, "last")
        batch = draw_batch(rng, config.batch, lesson, pool, large=kind == "drafts" and stage.step < early)
        with mixed_precision(world):
            mean = loss_of(model, batch.to(world.device))
        return mean, f"of {batch.ids.shape[0]} x {batch.ids.shape[1]} tokens"

    stage.run(loss)
    world.say(f"{kind} done: {stage.step} steps, {stage.spent:.1f} minutes")
    return stage


def sample(config: Config) -> None:
    """Runs stage 2: writes `pool.json`."""
    pool = draft_pool(load_average(config, "drafts"), config.pool, config.pool_drafts, seed=config.seed)
    rows = [[one.question, one.solution, list(one.drafts)] for one in pool]
    (Path(config.out) / "pool.json").write_text(json.dumps(rows) + "\n")


def read_pool(path: Path) -> list[Attempts]:
    """Reads the pool that `sample` wrote."""
    if not path.exists():
        raise ArgumentError(f"no {path}; run the stage 'samples' first")
    rows = json.loads(path.read_text())
    if not rows:
        raise ArgumentError(f"{path} is empty: the model finished no draft; raise drafts_steps")
    return [Attempts(question, solution, tuple(drafts)) for question, solution, drafts in rows]


def export(config: Config) -> None:
    """Runs stage 5: saves a stock folder of the latest stage that has a checkpoint."""
    trained = [kind for kind in TRAINED if (Path(config.out) / f"{kind}.pt").exists()]
    save_model(load_average(config, trained[-1] if trained else TRAINED[0]), Path(config.out) / "export" / "sums")


def evaluate(config: Config) -> None:
    """Runs stage 6: measures the model in `export/`; writes `scores.json`."""
    scores = report(load_folder(Path(config.out) / "export" / "sums"), config.problems, seed=config.seed + 1)
    file_report(Path(config.out) / "scores.json", scores)


def run(config: Config, world: World) -> None:
    """Runs the stages of the configuration."""
    stages = stages_of(config.stages, STAGES)
    if config.start:
        started_model(config)  # A wrong folder ends here, before any work.
    Path(config.out).mkdir(parents=True, exist_ok=True)
    for stage in stages:
        match stage:
            case "drafts" | "refine" | "polish" as kind:
                train(config, world, kind)
            case "samples":
                sample(config)
            case "export":
                export(config)
            case _:
                evaluate(config)


def main() -> None:
    """Runs the recipe."""
    run_recipe(Config, __doc__, run)


if __name__ == "__main__":
    main()
