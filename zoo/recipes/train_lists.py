"""Trains `lists-mdlm` and `lists-ar`, the zoo's text models, from nothing: "sort : dog ant cat =" -> "ant cat dog".

Both are stock Llama folders that `AutoModelForCausalLM.from_pretrained` loads, with a tokenizer of one token per word:
a masked diffusion model whose tokens all see each other, and a causal twin of the same size. There are four stages:

1. `mdlm`: the masked diffusion model learns to fill any masks of an answer and its ends of text; after a third of the
   steps most examples are of the tasks that take long to learn;
2. `ar`: the causal twin learns the next token of the same answers;
3. `export`: the averaged weights so far become `export/lists-mdlm/` and `export/lists-ar/`, also while stages run;
4. `evaluate`: answers fresh prompts of every task, one token per step, and measures how the random tasks' answers are
   distributed.

Run on one core:             OMP_NUM_THREADS=1 python zoo/recipes/train_lists.py --out runs/lists
Look at it while it trains:  python zoo/recipes/train_lists.py --out runs/lists --stages export,evaluate

Every step draws its data and masks from (seed, step), so a stage that was stopped continues from its checkpoint with
exactly the steps it would have made, on one core to the last bit. A stage ends at its number of steps, or at its
minutes if they are set and come first (then the clock decides, and no two runs are the same). Its learning rate falls
to zero by then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from partsong_zoo.folders import load_folder, save_folder
from partsong_zoo.lists.model import build_model, build_tokenizer
from partsong_zoo.lists.scoring import accuracy, total_variation
from partsong_zoo.lists.tasks import examples
from partsong_zoo.lists.training import causal_loss, diffusion_loss, draw_batch
from partsong_zoo.training.common import World, mixed_precision
from partsong_zoo.training.recipe import file_report, run_recipe
from partsong_zoo.training.stage import TrainingStage, inside_matrices, muon_and_adam, read_average, stages_of

STAGES: tuple[str, ...] = ("mdlm", "ar", "export", "evaluate")
KINDS: tuple[Literal["mdlm", "ar"], ...] = ("mdlm", "ar")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/lists"  # The folder for everything that is written.
    stages: str = ",".join(STAGES)  # The stages to run, with commas between.
    seed: int = 0  # The seed of all draws.
    device: str = "cpu"  # Where to train: cpu or cuda.
    save_minutes: float = 2.0  # Minutes between checkpoints.
    mdlm_steps: int = 12000  # Most steps of stage `mdlm`.
    mdlm_minutes: float = math.inf  # Most minutes of stage `mdlm`.
    ar_steps: int = 3000  # Most steps of stage `ar`.
    ar_minutes: float = math.inf  # Most minutes of stage `ar`.
    batch: int = 128  # Rows per step.
    heads: int = 4  # Attention heads.
    depth: int = 6  # Layers.
    muon_rate: float = 6e-3  # Peak learning rate of orthogonalised momentum.
    adam_rate: float = 3e-3  # Peak learning rate of Adam.
    prompts: int = 200  # Fresh prompts per task to evaluate.
    draws: int = 1000  # Draws per prompt to compare distributions.


def new_model(config: Config, kind: Literal["mdlm", "ar"]) -> LlamaForCausalLM:
    """Makes a model of random weights. Plain attention is the fastest on a CPU for rows this short."""
    torch.manual_seed(config.seed)
    model = build_model(kind, config.heads, config.depth)
    model.set_attn_implementation("eager")
    return model


def train(config: Config, world: World, kind: Literal["mdlm", "ar"]) -> TrainingStage:
    """Runs stage 1 or 2, which write `mdlm.pt` and `ar.pt`."""
    model = new_model(config, kind).to(cast(Any, world.device))
    rates = (config.muon_rate, config.adam_rate)
    stage = TrainingStage(
        world,
        Path(config.out) / f"{kind}.pt",
        model,
        muon_and_adam(model, inside_matrices(model), rates, 0.01),
        key=(KINDS.index(kind) + 81, config.seed, world.rank),
        steps=getattr(config, f"{kind}_steps"),
        minutes=getattr(config, f"{kind}_minutes"),
        save_minutes=config.save_minutes,
    )

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        late = 3 * stage.step >= stage.steps
        batch = draw_batch(rng, config.batch, fill=kind == "mdlm", late=late)
        with mixed_precision(world):
            loss = diffusion_loss(model, batch, rng) if kind == "mdlm" else causal_loss(model, batch)
        return loss, f"of {batch.ids.shape[1]} tokens"

    stage.run(loss_of)
    world.say(f"{kind} done: {stage.step} steps, {stage.spent:.1f} minutes")
    return stage


def export(config: Config) -> None:
    """Runs stage 3: saves a stock folder for every trained model."""
    for kind in KINDS:
        path = Path(config.out) / f"{kind}.pt"
        if path.exists():
            model = build_model(kind, config.heads, config.depth)
            model.load_state_dict(read_average(path))
            save_folder(model, build_tokenizer(), Path(config.out) / "export" / f"lists-{kind}")


def evaluate(config: Config) -> None:
    """Runs stage 4: measures the models in `export/` on fresh prompts and writes `scores-NAME.json`."""
    for folder in sorted((Path(config.out) / "export").iterdir()):
        model = load_folder(folder)
        random_tasks = [e.prompt for f in ("insert", "remove", "replace") for e in examples(3, 1, [f"{f}_random"])]
        report = {
            "model": folder.name,
            "prompts_per_task": config.prompts,
            "greedy": accuracy(model, config.prompts, seed=config.seed + 1),
            "sampled": accuracy(model, config.prompts, seed=config.seed + 1, sampled=True),
            "draws_per_prompt": config.draws,
            "total_variation": {p: round(total_variation(model, p, config.draws), 4) for p in random_tasks},
        }
        file_report(Path(config.out) / f"scores-{folder.name}.json", report)


def run(config: Config, world: World) -> None:
    """Runs the stages of the configuration."""
    stages = stages_of(config.stages, STAGES)
    Path(config.out).mkdir(parents=True, exist_ok=True)
    for stage in stages:
        match stage:
            case "mdlm" | "ar" as kind:
                train(config, world, kind)
            case "export":
                export(config)
            case _:
                evaluate(config)


def main() -> None:
    """Runs the recipe."""
    run_recipe(Config, __doc__, run)


if __name__ == "__main__":
    main()
