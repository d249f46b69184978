"""Trains streams: a small model with 1 and with P parallel streams, from nothing, on tasks that need much at once.

There are two tasks. `product` is "47*86=4042": two numbers of two digits and their product, whose digits are written
without steps between, so each must be worked out in one pass. `code` predicts the next byte of Python's own standard
library, or of any folder of text. Each seed has three sides, all with the same lessons, steps and learning rate:

- `one`: the backbone, one stream;
- `wide`: one stream, with feed-forward layers widened until it has as many parameters as `streams` in all;
- `streams`: the backbone of `one` with P streams, prefixes and aggregator.

There are four stages:

1. `train`: trains every side of every seed, into `OUT/SIDE-SEED/`;
2. `measure`: measures all on texts that no side was shown; writes `scores.json`, a row per side and seed;
3. `recycle`: freezes a backbone, `one` of the first seed or `--backbone`, which may have learned other texts. On it, it
   trains P streams, and for each seed one stream whose prefix has as many parameters as these in all; adds their rows;
4. `export`: writes `export/`, the model of `streams`, first seed, in ParScale's published layout.

Run on one core: OMP_NUM_THREADS=1 python zoo/recipes/train_parscale.py --out runs/parscale

The recycling in benchmarks/ takes half an hour on one core: a backbone of 0.9 M parameters learns Python's library,
then streams on it learn the sources of diffusers:

    python zoo/recipes/train_parscale.py --out runs/library --stages train --sides one --seeds 1 --task code \
        --width 128 --depth 4 --length 128 --batch 32 --steps 1400 --rate 3e-3
    python zoo/recipes/train_parscale.py --out runs/recycled --stages recycle --backbone runs/library/one-0 \
        --seeds 3 --task code --text FOLDER_OF_DIFFUSERS --width 128 --depth 4 --length 128 --batch 16 --steps 300 \
        --prefix 16 --spread 0.3 --rate 3e-3 --prefix-rate 0.2 --items 1024

Lessons are drawn from (seed, step), so a run that was stopped goes on from its checkpoints with the same steps. With
`accelerate launch zoo/recipes/train_parscale.py ...` each of several ranks takes its share of every batch.
"""

from __future__ import annotations

import json
import logging
import math
import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong.knobs import check_knobs, type_hints
from partsong.reasoning.parscale.model import ParScale
from partsong.reasoning.parscale.weights import StreamWeights
from partsong.seeds import derive
from partsong_zoo.training.parscale import StreamLesson, train
from partsong_zoo.training.parscale_checkpoint import save
from partsong_zoo.training.recipe import file_report, recipe_config

STAGES: tuple[str, ...] = ("train", "measure", "recycle", "export")
SIDES: tuple[str, ...] = ("one", "wide", "streams")
TIMES, EQUALS, BYTES = 10, 11, 128


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/parscale"  # The folder for everything that is written.
    stages: str = "train,measure"  # The stages to run, with commas between.
    sides: str = ",".join(SIDES)  # The sides to train, with commas between.
    task: Literal["product", "code"] = "product"  # What is learned.
    text: str = ""  # A folder of Python files for `code`. Default: Python's own library.
    backbone: str = ""  # The folder of the frozen backbone. Default: `one` of the first seed.
    seeds: int = 8  # How many seeds there are.
    streams: int = 4  # P, the number of streams.
    prefix: int = 8  # Learned keys of a stream's prefix.
    spread: float = 1.0  # Standard deviation of the first prefixes.
    smoothing: float = 0.1  # Least share of weight spread over all streams.
    steps: int = 2500  # Steps of training.
    batch: int = 128  # Rows per step.
    rate: float = 6e-3  # Peak learning rate.
    prefix_rate: float = 24e-3  # Peak learning rate of prefixes.
    width: int = 16  # Hidden size of the model.
    depth: int = 2  # Layers.
    items: int = 8192  # Rows to measure.
    length: int = 64  # Bytes of a row of `code`.


def build(config: Config, side: str, seed: int) -> tuple[LlamaForCausalLM, StreamWeights | None]:
    """Makes a model of random weights, and its streams if the side has any."""
    inner = 3 * config.width
    model = _model(config, inner, seed)
    many = side == "streams" and config.streams > 1
    if not many and side != "wide":
        return model, None
    weights = StreamWeights.new(
        model,
        config.streams,
        prefix_length=config.prefix,
        spread=config.spread,
        smoothing=config.smoothing,
        seed=derive(seed, "streams"),
    )
    if many:
        return model, weights
    added = sum(each.numel() for each in weights.parameters())
    return _model(config, inner + math.ceil(added / (3 * config.width * config.depth)), seed), None


def _model(config: Config, inner: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = LlamaConfig(
        vocab_size=12 if config.task == "product" else BYTES,
        hidden_size=config.width,
        intermediate_size=inner,
        num_hidden_layers=config.depth,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # Random matrices that keep the size of what they multiply; the usual 0.02 is for wide models.
        initializer_range=0.6 / math.sqrt(config.width),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(sizes)


def lessons(config: Config, seed: int, *, held_out: bool = False) -> Callable[[int], StreamLesson]:
    """Draws the lesson of every step: the same for all sides of a seed, and never one that measures."""
    check_knobs(type_hints(Config), {"task": config.task})

    def draw(step: int) -> StreamLesson:
        rng = np.random.default_rng(derive(seed, "held out" if held_out else "lesson", step))
        if config.task == "product":
            return _products(rng, config.batch, held_out)
        return _windows(rng, config.batch, config.length, _corpus(config.text)[held_out])

    return draw


def _products(rng: np.random.Generator, num: int, held_out: bool) -> StreamLesson:
    """Draws products; every eighth pair of numbers, by a sum that mixes them, is kept from training."""
    pairs = rng.integers(0, 100, (16 * num, 2))
    is_held_out = (31 * pairs[:, 0] + 17 * pairs[:, 1] + pairs[:, 0] * pairs[:, 1] // 7) % 8 == 0
    left, right = pairs[is_held_out == held_out][:num].T
    digits = partial(_digits, num=num)
    sign, end = np.full((num, 1), TIMES), np.full((num, 1), EQUALS)
    ids = np.concatenate([digits(left, 2), sign, digits(right, 2), end, digits(left * right, 4)], axis=1)
    learned = np.zeros(ids.shape, dtype=bool)
    learned[:, -4:] = True
    return StreamLesson(torch.from_numpy(ids), torch.from_numpy(learned))


def _digits(values: np.ndarray, width: int, num: int) -> np.ndarray:
    assert len(values) == num, "too few numbers were drawn"
    return np.stack([values // 10 ** (width - 1 - place) % 10 for place in range(width)], axis=1)


def _windows(rng: np.random.Generator, num: int, length: int, text: np.ndarray) -> StreamLesson:
    starts = rng.integers(0, len(text) - length, num)
    ids = torch.from_numpy(np.stack([text[start : start + length] for start in starts]))
    learned = torch.ones_like(ids, dtype=torch.bool)
    learned[:, 0] = False
    return StreamLesson(ids, learned)


@cache
def _corpus(folder: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the bytes of a folder's Python files; those of every tenth file, by its name, are kept from training."""
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib"} if not folder else set[str]()
    files = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in files:
        parts[zlib.crc32(path.name.encode()) % 10 == 0].append(path.read_bytes())
    if not all(parts):
        raise ArgumentError(f"{root} has {len(files)} Python files, too few to keep every tenth for measuring")
    train_text, other = (np.frombuffer(b"\0".join(part), np.uint8).astype(np.int64) for part in parts)
    return np.minimum(train_text, BYTES - 1), np.minimum(other, BYTES - 1)


def rates(config: Config) -> dict[str, Any]:
    """Returns the steps and rates of all sides; prefixes learn faster than all else."""
    return {"steps": config.steps, "rate": config.rate, "prefix_rate": config.prefix_rate}


def train_side(config: Config, side: str, seed: int) -> None:
    """Runs stage 1 for one side and seed; writes `OUT/SIDE-SEED/training.pt`."""
    model, weights = build(config, side, seed)
    logging.info("%s, seed %d: %d parameters", side, seed, count(model, weights))
    folder = Path(config.out) / f"{side}-{seed}"
    train(model, weights, lessons(config, seed), folder=folder, **rates(config))


def load(config: Config, side: str, seed: int) -> tuple[LlamaForCausalLM, StreamWeights | None]:
    """Loads what `train_side` wrote."""
    path = Path(config.out) / f"{side}-{seed}" / "training.pt"
    if not path.exists():
        raise ArgumentError(f"no {path}; run the stage 'train' first")
    model, weights = build(config, side, seed)
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["step"] < config.steps:
        raise ArgumentError(f"{path} is at step {state['step']} of {config.steps}; run the stage 'train' to its end")
    for name, module in (("model", model), ("weights", weights)):
        if module is not None:
            module.load_state_dict(_part(state, name))
    return model.eval(), weights


def _part(state: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
    """Picks the weights of `model` or `weights` in a checkpoint."""
    return {
        key.removeprefix(f"{name}."): value for key, value in state["weights"].items() if key.startswith(f"{name}.")
    }


def count(model: torch.nn.Module, weights: StreamWeights | None) -> int:
    """Counts the parameters, tied ones once."""
    return sum(each.numel() for part in (model, weights) if part is not None for each in part.parameters())


@torch.inference_mode()
def score(config: Config, model: LlamaForCausalLM, weights: StreamWeights | None) -> dict[str, float]:
    """Measures the loss per learned token in nats, and the shares of right tokens and of rows that are all right."""
    losses, right, whole = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    draw = lessons(config, 0, held_out=True)
    with ParScale(model, *() if weights is None else (weights,)):
        for step in range(math.ceil(config.items / config.batch)):
            lesson = draw(step)
            targets, learned = lesson.ids[:, 1:], lesson.learned[:, 1:]
            logits = cast(Any, model)(input_ids=lesson.ids, use_cache=False).logits[:, :-1]
            hit = logits.argmax(-1) == targets
            losses.append(F.cross_entropy(logits[learned].float(), targets[learned], reduction="none"))
            right.append(hit[learned])
            whole.append((hit | ~learned).all(1))
    loss, tokens, rows = (float(torch.cat(each).double().mean()) for each in (losses, right, whole))
    return {"loss": loss, "tokens_right": tokens, "rows_right": rows}


def measure(config: Config) -> None:
    """Runs stage 2: writes `scores.json`."""
    rows = []
    for seed in range(config.seeds):
        for side in config.sides.split(","):
            model, weights = load(config, side, seed)
            row = {"side": side, "seed": seed, "streams": 1 if weights is None else weights.num_streams}
            rows.append({**row, "parameters": count(model, weights), **score(config, model, weights)})
            logging.info("%s", rows[-1])
    _write(config, rows)


def recycle(config: Config) -> None:
    """Runs stage 3: adds rows to `scores.json`."""
    folder = Path(config.out)
    sides = ("frozen", "prefix", "recycled")
    rows = [row for row in _rows(folder) if row["side"] not in sides]
    model = _frozen(config)
    rows.append({"side": "frozen", "seed": 0, "streams": 1, "parameters": count(model, None)})
    rows[-1] |= score(config, model, None)
    for seed in range(config.seeds):
        for side, num in (("prefix", 1), ("recycled", config.streams)):
            weights = streams_on(config, model, num, seed)
            draw = lessons(config, derive(seed, "recycled"))
            train(model, weights, draw, frozen=True, folder=folder / f"{side}-{seed}", **rates(config))
            row = {"side": side, "seed": seed, "streams": num, "parameters": count(model, weights)}
            rows.append({**row, **score(config, model, weights)})
            logging.info("%s", rows[-1])
    _write(config, rows)


def streams_on(config: Config, model: LlamaForCausalLM, num: int, seed: int) -> StreamWeights:
    """Makes streams for a frozen backbone; the prefix of a single one has as many parameters as P streams in all."""
    knobs: dict[str, Any] = {"spread": config.spread, "smoothing": config.smoothing, "seed": derive(seed, "streams")}
    weights = StreamWeights.new(model, config.streams, prefix_length=config.prefix, **knobs)
    if num > 1:
        return weights
    key = 2 * config.depth * config.width
    return StreamWeights.new(model, 1, prefix_length=math.ceil(count(weights, None) / key), **knobs)


def _frozen(config: Config) -> LlamaForCausalLM:
    path = Path(config.backbone or f"{config.out}/one-0") / "training.pt"
    if not path.exists():
        raise ArgumentError(f"no {path}; run the stage 'train', or give a folder it wrote as --backbone")
    model = _model(config, 3 * config.width, 0)
    model.load_state_dict(_part(torch.load(path, map_location="cpu", weights_only=True), "model"))
    return model.eval()


def _rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "scores.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def _write(config: Config, rows: list[dict[str, Any]]) -> None:
    if Accelerator().is_main_process:
        report = {"config": {field.name: getattr(config, field.name) for field in fields(config)}, "rows": rows}
        file_report(Path(config.out) / "scores.json", report)


def export(config: Config) -> None:
    """Runs stage 4: writes `export/`."""
    model, weights = load(config, "streams", 0)
    assert weights is not None
    save(Path(config.out) / "export", model, weights)


def run(config: Config) -> None:
    """Runs the stages of the configuration."""
    stages, sides = config.stages.split(","), config.sides.split(",")
    for asked, known in ((stages, STAGES), (sides, SIDES)):
        if unknown := [each for each in asked if each not in known]:
            raise ArgumentError(f"no {unknown[0]!r}; there are {', '.join(known)}")
    Path(config.out).mkdir(parents=True, exist_ok=True)
    for stage in stages:
        match stage:
            case "train":
                for seed in range(config.seeds):
                    for side in sides:
                        train_side(config, side, seed)
            case "measure":
                measure(config)
            case "recycle":
                recycle(config)
            case _:
                export(config)


def main() -> None:
    """Runs the recipe."""
    config = recipe_config(Config, __doc__)
    torch.set_num_threads(1)
    run(config)


if __name__ == "__main__":
    main()
