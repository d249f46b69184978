"""Trains `sums`, the zoo's small reasoning model, from nothing: sums and countdowns worked out in steps.

"37+48-19*3=?" -> "19*3=57, 37+48=85, 85-57=28. answer: 28"
"make 64 from 3 7 25 6" -> "25-6=19, 19*3=57, 57+7=64: yes. answer: (25-6)*3+7", or other steps that end ": no."

A stock Llama folder with a tokenizer and a chat template. Six stages:

1. `drafts`: it learns solutions, and to do its sums honestly where they lead nowhere; at first of large problems only;
2. `samples`: what it makes of new training problems, eight drafts each, at temperature 1;
3. `refine`: it goes on, and in most steps reads drafts below a problem, its own or made up, right or wrong, at first
   one, then up to four: it repeats the end of a right one or solves the problem anew; and it lists what drafts found;
4. `polish`: the same with more first drafts, which it has unlearned in part by then;
5. `export`: the averaged weights so far become `export/sums/`, also while stages run;
6. `evaluate`: problems that training never showed: single samples, votes, refinement and Parallel-Distill-Refine.

Run on one core:             OMP_NUM_THREADS=1 python recipes/train_sums.py --out runs/sums
Look at it while it trains:  python recipes/train_sums.py --out runs/sums --stages export,evaluate

Every step draws its data from (seed, step), so a stage that was stopped continues from its checkpoint with just the
steps it would have made, on one core to the last bit. A stage ends at its number of steps, or at its minutes if they
are given and come first (then the clock decides, and no two runs are the same); its learning rate falls to zero by
then.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import tyro
from torch import Tensor
from transformers import LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong.zoo.folders import load_folder
from partsong.zoo.stage import TrainingStage, inside_matrices, muon_and_adam
from partsong.zoo.sums.model import build_model, save_model
from partsong.zoo.sums.sampling import draft_pool
from partsong.zoo.sums.scoring import report
from partsong.zoo.sums.training import Attempts, draw_batch, loss_of
from partsong.zoo.training import World, mixed_precision

STAGES: tuple[str, ...] = ("drafts", "samples", "refine", "polish", "export", "evaluate")
TRAINED: tuple[Literal["drafts", "refine", "polish"], ...] = ("drafts", "refine", "polish")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/sums"
    stages: str = ",".join(STAGES)
    seed: int = 0
    device: str = "cpu"
    save_minutes: float = 2.0
    drafts_steps: int = 1800
    drafts_minutes: float = math.inf
    large_steps: int = 986
    pool: int = 800
    pool_drafts: int = 8
    refine_steps: int = 700
    single_steps: int = 150
    refine_minutes: float = math.inf
    polish_steps: int = 1200
    polish_minutes: float = math.inf
    batch: int = 64
    heads: int = 5
    depth: int = 6
    muon_rate: float = 6e-3
    adam_rate: float = 3e-3
    problems: int = 500


def new_model(config: Config) -> LlamaForCausalLM:
    """A model of random weights. Plain attention is the fastest one on a CPU for rows this short."""
    torch.manual_seed(config.seed)
    model = build_model(config.heads, config.depth)
    model.set_attn_implementation("eager")
    return model


def averaged(config: Config, kind: str) -> LlamaForCausalLM:
    """The averaged weights of a stage's checkpoint, on the CPU."""
    path = Path(config.out) / f"{kind}.pt"
    if not path.exists():
        raise ArgumentError(f"no {path}; run the stage {kind!r} first")
    model = new_model(config)
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["average"])
    return model.eval()


def train(config: Config, world: World, kind: Literal["drafts", "refine", "polish"]) -> TrainingStage:
    """Stages 1, 3 and 4; write `drafts.pt`, `refine.pt` and `polish.pt`."""
    out, place = Path(config.out), TRAINED.index(kind)
    model = (averaged(config, TRAINED[place - 1]) if place else new_model(config)).to(cast(Any, world.device)).train()
    pool = read_pool(out / "pool.json") if place else []
    # What is known by then is not to be shaken up again.
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
            found = loss_of(model, batch.to(world.device))
        return found, f"of {batch.ids.shape[0]} x {batch.ids.shape[1]} tokens"

    stage.run(loss)
    world.say(f"{kind} done: {stage.step} steps, {stage.spent:.1f} minutes")
    return stage


def sample(config: Config) -> None:
    """Stage 2: writes `pool.json`."""
    pool = draft_pool(averaged(config, "drafts"), config.pool, config.pool_drafts, seed=config.seed)
    said = [[one.question, one.solution, list(one.drafts)] for one in pool]
    (Path(config.out) / "pool.json").write_text(json.dumps(said) + "\n")


def read_pool(path: Path) -> list[Attempts]:
    """What `sample` wrote."""
    if not path.exists():
        raise ArgumentError(f"no {path}; run the stage 'samples' first")
    said = json.loads(path.read_text())
    if not said:
        raise ArgumentError(f"{path} is empty: no draft of the model came to its end; raise drafts_steps")
    return [Attempts(question, solution, tuple(drafts)) for question, solution, drafts in said]


def export(config: Config) -> None:
    """Stage 5: saves a stock folder of the latest stage there is."""
    made = [kind for kind in TRAINED if (Path(config.out) / f"{kind}.pt").exists()]
    save_model(averaged(config, made[-1] if made else TRAINED[0]), Path(config.out) / "export" / "sums")


def evaluate(config: Config) -> None:
    """Stage 6: measures what is in `export/`; writes `scores.json`."""
    found = report(load_folder(Path(config.out) / "export" / "sums"), config.problems, seed=config.seed + 1)
    (Path(config.out) / "scores.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


def run(config: Config, world: World) -> None:
    """Runs the stages asked for."""
    asked = config.stages.split(",")
    if unknown := [stage for stage in asked if stage not in STAGES]:
        raise ArgumentError(f"no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    Path(config.out).mkdir(parents=True, exist_ok=True)
    for stage in asked:
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
    config = tyro.cli(Config, description=cast("str", __doc__).splitlines()[0])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    run(config, World(config.device))


if __name__ == "__main__":
    main()
