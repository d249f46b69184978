"""Trains streams on a question that needs several facts at once: which price is the highest?

Every good costs another digit in every shop, at random, and a small model learns them all by heart: "the second of
these goods, in this shop" gives a price (stage `learn`; texts of one to four goods). The question then is the highest
price of four goods in a shop, to be said at once: four facts must be looked up, at the one place where the shop is read
(stage `ask`). One stream has to do that in one pass of its layers. Four streams have four, by the same weights: they
begin as the prompts "the first", ..., "the fourth" (`StreamWeights.from_prompts`), and their network learns to weigh
them. All sides have the same lessons, in the same order:

- `frozen`: the model as it is, behind "the first";
- `prefix`: it stays as it is, and one stream learns a prefix of as many parameters as `recycled` adds in all;
- `recycled`: it stays as it is; P streams and their network learn;
- `wide`: one stream, all weights learn, feed-forward layers widened by as many parameters as `streams` adds in all;
- `longer`: the same with P times the steps, which computes as much as `streams`;
- `streams`: P streams, all weights learn;
- `noise`: the same with streams that begin as noise.

`export` writes `export/`, the model of `streams`, first seed, in ParScale's published layout.

Run, seven minutes a seed on one core: OMP_NUM_THREADS=1 python recipes/train_prices.py --out runs/prices

Lessons are drawn from (seed, step), so a run that was stopped goes on from its checkpoints with the same steps.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import tyro
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong.reasoning.parscale.checkpoint import save
from partsong.reasoning.parscale.model import ParScale
from partsong.reasoning.parscale.training import StreamLesson, train
from partsong.reasoning.parscale.weights import StreamWeights
from partsong.seeds import derive

STAGES: tuple[str, ...] = ("learn", "ask", "export")
SIDES: tuple[str, ...] = ("frozen", "prefix", "recycled", "wide", "longer", "streams", "noise")
DIGITS = 10


@dataclass(frozen=True, kw_only=True)
class Config:
    """The knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/prices"
    stages: str = "learn,ask"
    sides: str = ",".join(SIDES)
    first_seed: int = 0
    seeds: int = 5
    streams: int = 4
    goods: int = 48
    shops: int = 48
    width: int = 32
    depth: int = 2
    heads: int = 4
    inner: int = 256
    learn_steps: int = 6000
    learn_batch: int = 256
    learn_rate: float = 4e-3
    steps: int = 1500
    batch: int = 128
    rate: float = 6e-3
    streams_rate: float = 3e-3
    network_rate: float = 1e-2
    prefix_rate: float = 3e-2
    spread: float = 0.5
    items: int = 4096


def build(config: Config, seed: int, added: int = 0) -> LlamaForCausalLM:
    """A model of random weights; `added` more channels in each feed-forward layer."""
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
    """What everything costs, `[shops, goods]`."""
    return np.random.default_rng(derive(seed, "prices")).integers(0, DIGITS, (config.shops, config.goods))


def look_ups(config: Config, seed: int) -> Callable[[int], StreamLesson]:
    """Lessons of stage `learn`: which, goods, shop, its price; one good, then two, and so on, in turn."""
    table = prices(config, seed)

    def draw(step: int) -> StreamLesson:
        rng = np.random.default_rng(derive(seed, "look-up", step))
        goods, shop = _asked(config, rng, config.learn_batch, 1 + step % config.streams)
        which = rng.integers(0, goods.shape[1], (len(goods), 1))
        price = table[shop, np.take_along_axis(goods, which, axis=1)]
        return _lesson(config, which, goods, shop, price)

    return draw


def questions(config: Config, seed: int, *, held_out: bool = False) -> Callable[[int], StreamLesson]:
    """Lessons of stage `ask`: goods, shop, the highest of their prices there."""
    table = prices(config, seed)

    def draw(step: int) -> StreamLesson:
        rng = np.random.default_rng(derive(seed, "held out" if held_out else "question", step))
        goods, shop = _asked(config, rng, config.batch, config.streams)
        return _lesson(config, None, goods, shop, table[shop, goods].max(axis=1, keepdims=True))

    return draw


def _asked(config: Config, rng: np.random.Generator, num: int, goods: int) -> tuple[np.ndarray, np.ndarray]:
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
    """Stage 1 for one seed; leaves `OUT/learned-SEED/training.pt`."""
    draw = look_ups(config, seed)
    folder = Path(config.out) / f"learned-{seed}"
    train(build(config, seed), None, draw, steps=config.learn_steps, rate=config.learn_rate, folder=folder)


def learned(config: Config, seed: int) -> LlamaForCausalLM:
    """What `learn` left."""
    path = Path(config.out) / f"learned-{seed}" / "training.pt"
    if not path.exists():
        raise ArgumentError(f"no {path}; run the stage 'learn' first")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["step"] < config.learn_steps:
        raise ArgumentError(f"{path} is at step {state['step']} of {config.learn_steps}; run 'learn' to its end")
    model = build(config, seed)
    model.load_state_dict({name.removeprefix("model."): value for name, value in state["weights"].items()})
    return model.eval()


def widened(config: Config, model: LlamaForCausalLM, seed: int, parameters: int) -> LlamaForCausalLM:
    """The same function with so many more parameters: channels of random input whose output begins at zero."""
    wide = build(config, seed, math.ceil(parameters / (3 * config.width * config.depth)))
    state = wide.state_dict()
    for name, value in model.state_dict().items():
        if name.endswith("down_proj.weight"):
            state[name].zero_()
        state[name][tuple(slice(size) for size in value.shape)] = value
    wide.load_state_dict(state)
    return wide.eval()


def side(config: Config, name: str, seed: int) -> tuple[LlamaForCausalLM, StreamWeights | None]:
    """A side as it is before it learns."""
    model = learned(config, seed)
    ordinals = torch.arange(config.streams)[:, None] + DIGITS + config.goods + config.shops
    streams = StreamWeights.from_prompts(model, ordinals, seed=derive(seed, "streams"))
    added = count(streams)
    match name:
        case "frozen":
            return model, StreamWeights.from_prompts(model, ordinals[:1])
        case "prefix":
            # It begins as all the prompts, one behind another.
            num = math.ceil(added / (2 * config.depth * config.width))
            one: dict[str, Any] = {"prefix_length": num, "spread": config.spread, "seed": derive(seed, "prefix")}
            return model, StreamWeights.from_prompts(model, ordinals.T, **one)
        case "noise":
            fresh: dict[str, Any] = {"prefix_length": 1, "spread": config.spread, "seed": derive(seed, "noise")}
            return model, StreamWeights.new(model, config.streams, **fresh)
        case "wide" | "longer":
            return widened(config, model, seed, added), None
        case _:
            return model, streams


def ask(config: Config, name: str, seed: int) -> tuple[LlamaForCausalLM, StreamWeights | None]:
    """Stage 2 for one side and seed, from where its checkpoint is; leaves `OUT/SIDE-SEED/training.pt`."""
    model, weights = side(config, name, seed)
    frozen = name in ("frozen", "prefix", "recycled")
    if name != "frozen":
        # What did best on seed 0, of three or four for each; `noise` and `longer` take those of their siblings.
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
    """Parameters in all."""
    return sum(each.numel() for module in modules if module is not None for each in module.parameters())


@torch.inference_mode()
def score(config: Config, model: LlamaForCausalLM, weights: StreamWeights | None, seed: int) -> dict[str, float]:
    """Loss per answer in nats and the share of right ones, on `items` fresh questions."""
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
    """Stage 2; writes `scores.json`, a row per side and seed."""
    rows = list[dict[str, Any]]()
    for seed in range(config.first_seed, config.first_seed + config.seeds):
        for name in config.sides.split(","):
            model, weights = ask(config, name, seed)
            row = {"side": name, "seed": seed, "streams": 1 if weights is None else weights.num_streams}
            rows.append({**row, "parameters": count(model, weights), **score(config, model, weights, seed)})
            logging.info("%s", rows[-1])
    said = {"config": {field.name: getattr(config, field.name) for field in fields(config)}, "rows": rows}
    (Path(config.out) / "scores.json").write_text(json.dumps(said, indent=1) + "\n")


def run(config: Config) -> None:
    """Runs the stages asked for."""
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
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    run(tyro.cli(Config, description=cast("str", __doc__).splitlines()[0]))
