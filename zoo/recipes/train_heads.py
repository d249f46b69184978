"""Trains a head that guesses several tokens ahead of a frozen model, so that it answers in fewer steps.

The head is that of multi-token prediction (arXiv 2507.11851): masks behind a token, low-rank changes of the model that
only masks see, and a small sampler. `LocalEngine(model, speculate="head:path=FOLDER")` drafts with it; the text stays
what it is. There are four stages:

1. `samples`: the model answers prompts of the zoo, or of your own file; its answers become `samples.safetensors`;
2. `train`: the head learns the model's own distributions on them;
3. `export`: the averaged weights so far become `export/MODEL/head/`, also while stage 2 runs;
4. `evaluate`: counts the tokens of a step on fresh prompts, and how many guesses were right.

On one core:            OMP_NUM_THREADS=1 python zoo/recipes/train_heads.py --model sums --out runs/heads-sums
Look while it trains:   python zoo/recipes/train_heads.py --model sums --out runs/heads-sums --stages export,evaluate
A model of your own:    python zoo/recipes/train_heads.py --model FOLDER --prompts FILE --out runs/mine --device cuda

A file of prompts has one in each line; one in ten is kept to measure by. Every step draws its texts from (seed, step),
so a stage that was stopped continues from its checkpoint with exactly the steps it would have made.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.knobs import check_knobs, type_hints
from partsong.reasoning import Completion, Message, Parameters, Request
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.local.loading import LoadedModel, load
from partsong.reasoning.local.mask_head import MaskHead, save_head
from partsong.reasoning.local.speculation.head import TrainedHead
from partsong.seeds import derive
from partsong_zoo.heads import SampledTexts, prompts_of, sample_texts
from partsong_zoo.training.common import World, mixed_precision
from partsong_zoo.training.head_losses import anchor, head_losses
from partsong_zoo.training.recipe import file_report, run_recipe
from partsong_zoo.training.stage import TrainingStage, adam, read_average, stages_of

STAGES: tuple[str, ...] = ("samples", "train", "export", "evaluate")
#: One prompt of a file in so many is kept to measure by.
HELD_OUT = 10


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/heads"  # The folder for everything that is written.
    stages: str = ",".join(STAGES)  # The stages to run, with commas between.
    model: str = "lists-ar"  # The model: a zoo name, a folder or a hub id.
    prompts: str = ""  # A file with a prompt in each line. Default: those of the zoo model's own task.
    seed: int = 0  # The seed of all draws.
    device: str = "cpu"  # Where to train: cpu or cuda.
    save_minutes: float = 2.0  # Minutes between checkpoints.
    texts: int = 12000  # Texts that `samples` draws.
    max_tokens: int = 96  # Most tokens of a text's answer.
    masks: int = 6  # Masks behind a token.
    rank: int = 16  # Rank of the changes that masks see.
    alpha: float = 32.0  # How much they count, times the rank.
    steps: int = 2000  # Most steps of `train`.
    minutes: float = math.inf  # Most minutes of `train`.
    batch: int = 32  # Texts per step.
    anchors: int = 6  # Places of a text where masks stand.
    rate: float = 3e-3  # Peak learning rate.
    problems: int = 100  # Fresh prompts to evaluate.


def own_prompts(config: Config, num: int, *, fresh: bool) -> list[str]:
    """Draws prompts of the model's task, or reads them."""
    if not config.prompts:
        return prompts_of(config.model, num, seed=config.seed, fresh=fresh)
    path = Path(config.prompts)
    if not path.is_file():
        raise ArgumentError(f"no file {path}; give --prompts a file with a prompt in each line")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = [line for place, line in enumerate(lines) if (place % HELD_OUT == 0) == fresh]
    if not chosen:
        raise ArgumentError(f"{path} has {len(lines)} prompts; it needs more than {HELD_OUT}")
    return [chosen[index % len(chosen)] for index in range(num)]


def loaded_model(config: Config) -> LoadedModel:
    """Loads the model, frozen, for training."""
    loaded = load(config.model, None, None, config.device)
    # Plain attention takes any mask.
    loaded.module.set_attn_implementation("eager")
    loaded.module.requires_grad_(False)
    return loaded


def new_head(config: Config, loaded: LoadedModel) -> MaskHead:
    """Makes an untrained head."""
    torch.manual_seed(config.seed)
    vocabulary = loaded.tokenizer.get_vocab()
    return MaskHead.of(loaded.module, vocabulary, num_masks=config.masks, rank=config.rank, alpha=config.alpha)


def sample(config: Config) -> None:
    """Runs stage 1: writes `samples.safetensors`."""
    engine = LocalEngine(config.model, device=config.device)
    prompts = own_prompts(config, config.texts, fresh=False)
    texts = sample_texts(engine, prompts, seed=config.seed, max_tokens=config.max_tokens)
    save_file(texts._asdict(), Path(config.out) / "samples.safetensors")


def read_samples(config: Config) -> SampledTexts:
    """Reads what `sample` has written."""
    path = Path(config.out) / "samples.safetensors"
    if not path.is_file():
        raise ArgumentError(f"no {path}; run the stage 'samples' first")
    return SampledTexts(**load_file(path))


def train(config: Config, world: World) -> TrainingStage:
    """Runs stage 2, which writes `head.pt`."""
    texts, loaded = read_samples(config), loaded_model(config)
    head = new_head(config, loaded)
    head.masks.attach(loaded.module)
    stage = TrainingStage(
        world,
        Path(config.out) / "head.pt",
        head,
        [adam(list(head.parameters()), config.rate, decay=0.01)],
        key=(121, config.seed, world.rank),
        steps=config.steps,
        minutes=config.minutes,
        save_minutes=config.save_minutes,
    )

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        rows = torch.from_numpy(rng.integers(len(texts.ids), size=config.batch))
        lengths = texts.lengths[rows]
        anchored = anchor(texts.ids[rows, : int(lengths.max())], texts.starts[rows], lengths, config.anchors)
        with mixed_precision(world):
            losses = head_losses(loaded.module, head, anchored.to(world.device))
        return losses.total, f"sampler {float(losses.sampler.detach()):.3f}, near {float(losses.near):.3f}"

    stage.run(loss_of)
    world.say(f"head done: {stage.step} steps, {stage.spent:.1f} minutes")
    return stage


def exported(config: Config) -> Path:
    """Returns the folder that stage 3 writes."""
    return Path(config.out) / "export" / Path(config.model).name / "head"


def export(config: Config) -> None:
    """Runs stage 3: saves the averaged weights."""
    path = Path(config.out) / "head.pt"
    if not path.is_file():
        raise ArgumentError(f"no {path}; run the stage 'train' first")
    head = new_head(config, loaded_model(config))
    head.load_state_dict(read_average(path))
    save_head(head, exported(config))


def evaluate(config: Config) -> None:
    """Runs stage 4: measures the head in `export/` on fresh prompts; writes `scores.json`."""
    prompts = own_prompts(config, config.problems, fresh=True)
    scores: dict[str, Any] = {"model": config.model, "prompts": len(prompts)}
    for temperature in (0.0, 1.0):
        engine = LocalEngine(config.model, device=config.device, speculate=TrainedHead(path=exported(config)))
        answers = asyncio.run(one_by_one(engine, config, prompts, temperature))
        later = sum(each.usage.completion - 1 for each in answers)
        drafted, rejected = (sum(getattr(each.usage, name) for each in answers) for name in ("drafted", "rejected"))
        scores[f"temperature {temperature:g}"] = {
            "tokens": later,
            "guessed": drafted,
            "right": drafted - rejected,
            # A forward reads each prompt and gives the first token.
            "tokens_per_forward": round(later / max(1, engine.model.forwards - len(answers)), 2),
        }
    file_report(Path(config.out) / "scores.json", scores)


async def one_by_one(engine: LocalEngine, config: Config, prompts: list[str], temperature: float) -> list[Completion]:
    """Answers prompts, one at a time."""
    parameters = Parameters(max_tokens=config.max_tokens, temperature=temperature)
    answers = list[Completion]()
    for index, prompt in enumerate(prompts):
        seed = derive(config.seed, "evaluate", index)
        chat = (Message("user", (prompt,)),)
        answers.append(await engine.generate(Request(messages=chat, parameters=parameters, seed=seed)))
    await engine.close()
    return answers


def run(config: Config, world: World) -> None:
    """Runs the stages of the configuration."""
    check_knobs(type_hints(Config), vars(config))
    stages = stages_of(config.stages, STAGES)
    Path(config.out).mkdir(parents=True, exist_ok=True)
    for stage in stages:
        match stage:
            case "samples":
                sample(config)
            case "train":
                train(config, world)
            case "export":
                export(config)
            case _:
                evaluate(config)


def main() -> None:
    """Runs the recipe."""
    run_recipe(Config, __doc__, run)


if __name__ == "__main__":
    main()
