"""Trains `tiles`: the pictures of `shapes` as 8 x 8 tokens, which a transformer decides in any order.

There are five stages:

1. `tokenizer`: learns to turn pictures into tokens and back, and counts the facts that survive; writes `tokenizer/`;
2. `pool`: draws scenes once and turns them into tokens;
3. `transformer`: learns every token of a picture from its caption and from the groups of tokens before its own, for a
   random order and a random number of groups;
4. `export`: writes the folder `export/` that ships as `tiles`;
5. `evaluate`: reads facts of fresh pictures in 64, 12 and 8 steps.

Run on one core:  OMP_NUM_THREADS=1 python zoo/recipes/train_tiles.py --out runs/tiles

Every step draws its data from (seed, step), so a stage that was stopped continues from its checkpoint with exactly the
steps it would have made.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partsong.samplers.any_order import LPD, group_sizes
from partsong_zoo.shapes.grammar import describe
from partsong_zoo.shapes.model import token_ids
from partsong_zoo.shapes.pool import draw_scenes, pictures
from partsong_zoo.shapes.reader import facts
from partsong_zoo.shapes.scenes import Thing, draw_things, generator
from partsong_zoo.tiles.loading import load_tiles, save_tiles
from partsong_zoo.tiles.model import build_model, group_loss
from partsong_zoo.tiles.scoring import score_tiles
from partsong_zoo.tiles.tokenizer import build_tokenizer, decode, encode, tokenizer_loss
from partsong_zoo.training.common import World, mixed_precision
from partsong_zoo.training.recipe import file_report, run_recipe
from partsong_zoo.training.stage import TrainingStage, adam, inside_matrices, muon_and_adam, run_stages

STAGES: tuple[str, ...] = ("tokenizer", "pool", "transformer", "export", "evaluate")
#: First integers of the keys of random draws.
TOKENIZER, FRESH, POOL, TRANSFORMER = 181, 182, 183, 184
#: Numbers of groups that training draws from.
GROUPS = (64, 32, 16, 12, 8)
_AT_A_TIME = 64


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/tiles"  # The folder for everything that is written.
    stages: str = ",".join(STAGES)  # The stages to run, with commas between.
    seed: int = 0  # The seed of all draws.
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # Where to train: cpu or cuda.
    save_minutes: float = 1.0  # Minutes between checkpoints.
    tokenizer_steps: int = 1200  # Steps of stage 1.
    tokenizer_batch: int = 32  # Pictures per step of stage 1.
    tokenizer_rate: float = 2e-3  # Its peak learning rate.
    scenes: int = 100  # Fresh scenes whose pictures are read after the tokenizer.
    pool_size: int = 40_000  # Pictures that stage 2 turns into tokens.
    heads: int = 4  # Attention heads of the transformer.
    depth: int = 6  # Its layers.
    steps: int = 4000  # Steps of stage 3.
    minutes: float = 600.0  # Most minutes of stage 3.
    batch: int = 64  # Pictures per step of stage 3.
    muon_rate: float = 4e-3  # Peak learning rate of orthogonalised momentum.
    adam_rate: float = 2e-3  # Peak learning rate of Adam.
    caption_dropout: float = 0.1  # Share of empty captions, for guidance.
    captions: int = 200  # Fresh captions of stage 5.
    guidance: float = 3.0  # How far stage 5 goes beyond the caption's own logits.


# --- stage 1 ----------------------------------------------------------------------------------------------------------


def train_tokenizer(config: Config, world: World) -> None:
    """Runs stage 1; writes `tokenizer.pt` and `tokenizer/`."""
    torch.manual_seed(config.seed)
    model = build_tokenizer().to(world.device)
    stage = TrainingStage(
        world,
        Path(config.out) / "tokenizer.pt",
        model,
        [adam([p for p in model.parameters() if p.requires_grad], config.tokenizer_rate)],
        key=(TOKENIZER, config.seed),
        steps=config.tokenizer_steps,
        save_minutes=config.save_minutes,
    )

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        images = pictures([draw_things(rng) for _ in range(config.tokenizer_batch)]).to(world.device)
        with mixed_precision(world):
            loss, mse = tokenizer_loss(model, images)
        return loss, f"psnr {10 * math.log10(4 / mse):.1f} dB"

    stage.run(loss_of)
    average: Any = stage.average.module
    average.save_pretrained(Path(config.out) / "tokenizer")
    read_back(config, world, average)


def read_back(config: Config, world: World, model: Any) -> None:
    """Reads facts of fresh scenes from pictures that were tokens; writes `tokenizer.json`."""
    rng, held, errors, used = generator(FRESH, config.seed), [], [], set()
    while len(errors) < config.scenes:
        things = draw_things(rng)
        caption = describe(things, rng, fresh=True)
        if caption is None:
            continue
        image = pictures([things]).to(world.device)
        codes = encode(model, image)
        again = decode(model, codes)[0].clamp(-1, 1)
        errors.append(float((again - image[0]).square().mean()))
        used |= set(codes.flatten().tolist())
        held += facts(caption, (again.permute(1, 2, 0).cpu().numpy() + 1) / 2).values()
    report = {
        "facts_read": float(np.mean(held)),
        "psnr": 10 * math.log10(4 / float(np.mean(errors))),
        "codes_used": len(used),
    }
    file_report(Path(config.out) / "tokenizer.json", report)
    world.say(f"tokenizer reads back {report}")


def load_tokenizer(config: Config, world: World) -> Any:
    """Loads what stage 1 has written."""
    from diffusers import VQModel

    loaded: Any = VQModel.from_pretrained(Path(config.out) / "tokenizer")
    return loaded.to(world.device).eval()


# --- stages 2 and 3 ---------------------------------------------------------------------------------------------------


def encode_pool(config: Config, world: World) -> None:
    """Runs stage 2: writes `pool.npy`, uint16."""
    path = Path(config.out) / "pool.npy"
    if path.exists():
        return
    model, scenes, parts = load_tokenizer(config, world), draw_scenes(config.pool_size, POOL, config.seed), []
    for first in range(0, len(scenes), _AT_A_TIME):
        codes = encode(model, pictures(scenes[first : first + _AT_A_TIME]).to(world.device))
        parts.append(codes.cpu().numpy().astype(np.uint16))
        if first % (100 * _AT_A_TIME) == 0:
            world.say(f"pool {first} of {len(scenes)}")
    with path.with_suffix(".new").open("wb") as file:
        np.save(file, np.concatenate(parts))
    path.with_suffix(".new").replace(path)


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Draws captions and tokens.

    Attributes:
        codes: of the pool.
        scenes: what it shows.
        config: the recipe's.
    """

    codes: NDArray[np.uint16]
    scenes: list[list[Thing]]
    config: Config

    def draw(self, rng: np.random.Generator, device: torch.device) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Returns ids of captions, codes, orders and the sizes of groups."""
        rows = rng.integers(len(self.codes), size=self.config.batch)
        captions = [describe(self.scenes[row], rng) or "" for row in rows]
        dropped = rng.random(len(rows)) < self.config.caption_dropout
        words = token_ids(["" if drop else caption for caption, drop in zip(captions, dropped, strict=True)])
        words = words[:, : int((words != 0).sum(1).max())]
        codes = torch.from_numpy(self.codes[rows].astype(np.int64))
        order = torch.from_numpy(rng.random(codes.shape).argsort(1))
        sizes = group_sizes(codes.shape[1], int(rng.choice(GROUPS)))
        return words.to(device), codes.to(device), order.to(device), sizes


def train_transformer(config: Config, world: World) -> None:
    """Runs stage 3; writes `transformer.pt`."""
    torch.manual_seed(config.seed)
    model: Any = build_model(config.heads, config.depth)
    # At this length a CPU takes five times longer for the backward pass of fused attention.
    model.set_attn_implementation("eager")
    model = model.to(world.device)
    rates = config.muon_rate, config.adam_rate
    stage = TrainingStage(
        world,
        Path(config.out) / "transformer.pt",
        model,
        muon_and_adam(model, inside_matrices(model), rates, decay=0.01),
        key=(TRANSFORMER, config.seed),
        steps=config.steps,
        minutes=config.minutes,
        save_minutes=config.save_minutes,
        report_every=20,
    )
    codes = np.load(Path(config.out) / "pool.npy")
    examples = Examples(codes=codes, scenes=draw_scenes(len(codes), POOL, config.seed), config=config)

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        drawn = examples.draw(rng, world.device)
        with mixed_precision(world):
            return group_loss(model, *drawn), ""

    stage.run(loss_of)


# --- stages 4 and 5 ---------------------------------------------------------------------------------------------------


def export(config: Config, world: World) -> None:
    """Runs stage 4: writes the folder `export/` from the averaged weights."""
    saved = torch.load(Path(config.out) / "transformer.pt", map_location="cpu", weights_only=True)
    model: Any = build_model(config.heads, config.depth)
    model.load_state_dict(saved["average"])
    save_tiles(model, load_tokenizer(config, world).cpu(), Path(config.out) / "export", guidance=config.guidance)
    world.say(f"exported the weights of step {saved['step']}")


def evaluate(config: Config, world: World) -> None:
    """Runs stage 5; writes `facts.json`."""
    loaded, report = load_tiles(Path(config.out) / "export"), {}
    for steps in (64, 12, 8):
        result = score_tiles(loaded, LPD(steps=steps), config.captions, seed=config.seed)
        report[f"{steps} steps"] = {"facts_read": round(result.facts_read, 4), "all_right": round(result.all_right, 4)}
    file_report(Path(config.out) / "facts.json", report)
    world.say(json.dumps(report))


def run(config: Config, world: World) -> None:
    """Runs the stages of the configuration."""
    runners: dict[str, Any] = {"tokenizer": train_tokenizer, "pool": encode_pool, "transformer": train_transformer}
    runners |= {"export": export, "evaluate": evaluate}
    run_stages(config, world, runners)


def main() -> None:
    """Runs the recipe."""
    run_recipe(Config, __doc__, run)


if __name__ == "__main__":
    main()
