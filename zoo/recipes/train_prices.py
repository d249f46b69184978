"""Trains streams on a question that needs several facts at once: which price is the highest?

Every good has a random digit as its price in every shop, and a small model learns all prices by heart: "the second of
these goods, in this shop" gives a price (stage `learn`, with texts of one to four goods). Then it is asked for the
highest price of four goods in a shop, without steps between: four facts must be looked up at the one place where the
shop is read (stage `ask`). One stream has one pass of its layers for that. Four streams have four passes of the same
weights: they begin as the prompts "the first", ..., "the fourth" (`StreamWeights.from_prompts`), and their network
learns to weigh them. All sides have the same lessons, in the same order:

- `frozen`: the model as it is, after "the first";
- `prefix`: the model stays, and one stream learns a prefix of as many parameters as `recycled` adds in all;
- `recycled`: the model stays; P streams and their network learn;
- `wide`: one stream, all weights learn, feed-forward layers widened by as many parameters as `streams` adds in all;
- `longer`: the same with P times the steps, which computes as much as `streams`;
- `streams`: P streams, all weights learn;
- `noise`: the same with streams that begin as noise.

`export` writes `export/`, the model of `streams`, first seed, in ParScale's published layout.

Run on one core, seven minutes a seed: OMP_NUM_THREADS=1 python zoo/recipes/train_prices.py --out runs/prices

Lessons are drawn from (seed, step), so a run that was stopped goes on from its checkpoints with the same steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong.reasoning.parscale.model import ParScale
from partsong.reasoning.parscale.weights import StreamWeights
from partsong.seeds import derive
from partsong_zoo.training.parscale import StreamLesson, train
from partsong_zoo.training.parscale_checkpoint import save
from partsong_zoo.training.recipe import file_report, recipe_config

STAGES: tuple[str, ...] = ("learn", "ask", "export")
SIDES: tuple[str, ...] = ("frozen", "prefix", "recycled", "wide", "longer", "streams", "noise")
DIGITS = 10


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/prices"  # The folder for everything that is written.
    stages: str = "learn,ask"  # The stages to run, with commas between.
    sides: str = ",".join(SIDES)  # The sides to train, with commas between.
    first_seed: int = 0  # The first seed.
    seeds: int = 5  # How many seeds there are.
    streams: int = 4  # P, the number of streams.
    goods: int = 48  # How many goods there are.
    shops: int = 48  # How many shops there are.
    width: int = 32  # Hidden size of the model.
    depth: int = 2  # Layers.
    heads: int = 4  # Attention heads.
    inner: int = 256  # Width of its feed-forward layers.
    learn_steps: int = 6000  # Steps of `learn`.
    learn_batch: int = 256  # Rows per step of `learn`.
    learn_rate: float = 4e-3  # Peak learning rate of `learn`.
    steps: int = 1500  # Steps of `ask`.
    batch: int = 128  # Rows per step.
    rate: float = 6e-3  # Peak learning rate of sides with one stream.
    streams_rate: float = 3e-3  # Peak learning rate of sides whose streams and weights learn.
    network_rate: float = 1e-2  # Peak learning rate of `recycled`.
    prefix_rate: float = 3e-2  # Peak learning rate of prefixes.
    spread: float = 0.5  # Standard deviation of random prefixes.
    items: int = 4096  # Questions to measure.


def build(config: Config, seed: int, added: int = 0) -> LlamaForCausalLM:
    """Makes a model of random weights, with `added` more channels in each feed-forward layer."""
    torch.manual_seed(seed)
    sizes = LlamaConfig(
        # Digits, goods, shops, and "the first" to "the last".
        vocab_size=DIGITS + config.goods + config.shops + config.streams,
        hidden_size=config.width,
        intermediate_size=config.inner + added,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=64,
        initializer_range=0.6 / math.sqrt(config.width),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(sizes)


def prices(config: Config, seed: int) -> np.ndarray:
    """Draws all prices, `[shops, goods]`."""
    return np.random.default_rng(derive(seed, "prices")).integers(0, DIGITS, (config.shops, config.goods))


def look_ups(config: Config, seed: int) -> Callable[[int], StreamLesson]:
    """Draws the lessons of stage `learn`: which, goods, shop, price; with one good, then two, and so on, in turn."""
    table = prices(config, seed)

    def draw(step: int) -> StreamLesson:
        rng = np.random.default_rng(derive(seed, "look-up", step))
        goods, shop = _draw_goods(config, rng, config.learn_batch, 1 + step % config.streams)
        which = rng.integers(0, goods.shape[1], (len(goods), 1))
        price = table[shop, np.take_along_axis(goods, which, axis=1)]
        return _lesson(config, which, goods, shop, price)

    return draw


def questions(config: Config, seed: int, *, held_out: bool = False) -> Callable[[int], StreamLesson]:
    """Draws the lessons of stage `ask`: goods, shop, the highest of their prices there."""
    table = prices(config, seed)

    def draw(step: int) -> StreamLesson:
        rng = np.random.default_rng(derive(seed, "held out" if held_out else "question", step))
        goods, shop = _draw_goods(config, rng, config.batch, config.streams)
        return _lesson(config, None, goods, shop, table[shop, goods].max(axis=1, keepdims=True))

    return draw


def _draw_goods(config: Config, rng: np.random.Generator, num: int, goods: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.integers(0, config.goods, (num, goods)), rng.integers(0, config.shops, (num, 1))


def _lesson(
    config: Config, which: np.ndarray | None, goods: np.ndarray, shop: np.ndarray, answer: np.ndarray
) -> StreamLesson:
    first = DIGITS + config.goods
    parts = [DIGITS + goods, first + shop, answer]
    if which is not None:
        parts.insert(0, first + config.shops + which)
    ids = torch.from_numpy(np.concatenate(parts, axis=1))
    learned = torch.zeros_like(ids, dtype=torch.bool)
    learned[:, -1] = True
    return StreamLesson(ids, learned)


def learn(config: Config, seed: int) -> None:
    """Runs stage 1 for one seed; writes `OUT/learned-SEED/training.pt`."""
    draw = look_ups(config, seed)
    folder = Path(config.out) / f"learned-{seed}"
    train(build(config, seed), None, draw, steps=config.learn_steps, rate=config.learn_rate, folder=folder)


def load_learned(config: Config, seed: int) -> LlamaForCausalLM:
    """Loads what `learn` wrote."""
    path = Path(config.out) / f"learned-{seed}" / "training.pt"
    if not path.exists():
        raise ArgumentError(f"no {path}; run the stage 'learn' first")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["step"] < config.learn_steps:
        raise ArgumentError(f"{path} is at step {state['step']} of {config.learn_steps}; run 'learn' to its end")
    model = build(config, seed)
    model.load_state_dict({name.removeprefix("model."): value for name, value in state["weights"].items()})
    return model.eval()


def widen(config: Config, model: LlamaForCausalLM, seed: int, parameters: int) -> LlamaForCausalLM:
    """Adds about this many parameters without effect: channels of random input whose output begins at zero."""
    wide = build(config, seed, math.ceil(parameters / (3 * config.width * config.depth)))
    state = wide.state_dict()
    for name, value in model.state_dict().items():
        if name.endswith("down_proj.weight"):
            state[name].zero_()
        state[name][tuple(slice(size) for size in value.shape)] = value
    wide.load_state_dict(state)
    return wide.eval()


def make_side(config: Config, name: str, seed: int) -> tuple[LlamaForCausalLM, StreamWeights | None]:
    """Makes a side as it is before it learns."""
    model = load_learned(config, seed)
    ordinals = torch.arange(config.streams)[:, None] + DIGITS + config.goods + config.shops
    streams = StreamWeights.from_prompts(model, ordinals, seed=derive(seed, "streams"))
    added = count(streams)
    match name:
        case "frozen":
            return model, StreamWeights.from_prompts(model, ordinals[:1])
        case "prefix":
            # It begins as all the prompts, one after the other.
            num = math.ceil(added / (2 * config.depth * config.width))
            one: dict[str, Any] = {"prefix_length": num, "spread": config.spread, "seed": derive(seed, "prefix")}
            return model, StreamWeights.from_prompts(model, ordinals.T, **one)
        case "noise":
            fresh: dict[str, Any] = {"prefix_length": 1, "spread": config.spread, "seed": derive(seed, "noise")}
            return model, StreamWeights.new(model, config.streams, **fresh)
        case "wide" | "longer":
            return widen(config, model, seed, added), None
        case _:
            return model, streams


def ask(config: Config, name: str, seed: int) -> tuple[LlamaForCausalLM, StreamWeights | None]:
    """Runs stage 2 for one side and seed, from its checkpoint if there is one; writes `OUT/SIDE-SEED/training.pt`."""
    model, weights = make_side(config, name, seed)
    frozen = name in ("frozen", "prefix", "recycled")
    if name != "frozen":
        # The best of three or four rates for each on seed 0; `noise` and `longer` take those of their siblings.
        many = {"streams": config.streams_rate, "noise": config.streams_rate, "recycled": config.network_rate}
        rate = many.get(name, config.rate)
        train(
            model,
            weights,
            questions(config, seed),
            steps=config.steps * (config.streams if name == "longer" else 1),
            rate=rate,
            prefix_rate=config.prefix_rate if frozen or name == "noise" else rate,
            frozen=frozen,
            folder=Path(config.out) / f"{name}-{seed}",
        )
    return model.eval(), weights


def count(*modules: torch.nn.Module | None) -> int:
    """Counts the parameters of all modules."""
    return sum(each.numel() for module in modules if module is not None for each in module.parameters())


@torch.inference_mode()
def score(config: Config, model: LlamaForCausalLM, weights: StreamWeights | None, seed: int) -> dict[str, float]:
    """Measures the loss per answer in nats and the share of right ones, on `items` fresh questions."""
    losses, right = list[torch.Tensor](), list[torch.Tensor]()
    draw = questions(config, seed, held_out=True)
    with ParScale(model, *() if weights is None else (weights,)):
        for step in range(math.ceil(config.items / config.batch)):
            ids = draw(step).ids
            logits = cast(Any, model)(input_ids=ids, use_cache=False).logits[:, -2].float()
            losses.append(F.cross_entropy(logits, ids[:, -1], reduction="none"))
            right.append(logits.argmax(-1) == ids[:, -1])
    loss, share = (float(torch.cat(each).double().mean()) for each in (losses, right))
    return {"loss": loss, "tokens_right": share, "rows_right": share}


def ask_all(config: Config) -> None:
    """Runs stage 2; writes `scores.json`, a row per side and seed."""
    rows = list[dict[str, Any]]()
    for seed in range(config.first_seed, config.first_seed + config.seeds):
        for name in config.sides.split(","):
            model, weights = ask(config, name, seed)
            row = {"side": name, "seed": seed, "streams": 1 if weights is None else weights.num_streams}
            rows.append({**row, "parameters": count(model, weights), **score(config, model, weights, seed)})
            logging.info("%s", rows[-1])
    report = {"config": {field.name: getattr(config, field.name) for field in fields(config)}, "rows": rows}
    file_report(Path(config.out) / "scores.json", report)


def run(config: Config) -> None:
    """Runs the stages of the configuration."""
    stages, sides = config.stages.split(","), config.sides.split(",")
    for asked, known in ((stages, STAGES), (sides, SIDES)):
        if unknown := [each for each in asked if each not in known]:
            raise ArgumentError(f"no {unknown[0]!r}; there are {', '.join(known)}")
    Path(config.out).mkdir(parents=True, exist_ok=True)
    for stage in stages:
        match stage:
            case "learn":
                for seed in range(config.first_seed, config.first_seed + config.seeds):
                    learn(config, seed)
            case "ask":
                ask_all(config)
            case _:
                model, weights = ask(config, "streams", config.first_seed)
                assert weights is not None
                save(Path(config.out) / "export", model, weights)


if __name__ == "__main__":
    run(recipe_config(Config, __doc__))
