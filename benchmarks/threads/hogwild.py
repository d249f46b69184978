"""Times workers that see each other, all sides in turn: ``python benchmarks/threads/hogwild.py``.

Every side reads the same tokens, one per worker and step, after the same prompt and the same texts, and the logits of
the last step are compared. Two sides turn and copy all keys that a worker sees in every step, as the released code of
Hogwild! Inference does outside of its CUDA kernels. One of them uses the same packed layers, the other the stock model.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.parallel.text.cache_names import cache_name
from partsong.reasoning import Message, Parameters, Request
from partsong.reasoning.hogwild.attention import Feed, ViewStep, forward
from partsong.reasoning.hogwild.cache import PAGE, BlockStore, CacheBlock
from partsong.reasoning.hogwild.rotary import Rotary, rotary_of
from partsong.reasoning.local import LocalEngine, smollm2
from partsong.reasoning.local.model import LocalModel


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to time."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    workers: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of workers."""
    prompt_tokens: int = 512
    """Tokens of the prompt that all workers see."""
    own_tokens: int = 128
    """Tokens that the first worker has written; each next one has eight fewer, so the views are ragged."""
    steps: int = 24
    """Steps to time, with one token of every worker each."""
    rounds: int = 5
    """Rounds; the median counts."""
    threads: int = 1
    """Threads of torch, for all sides."""


class Views:
    """Holds blocks `[layers, kv_heads, tokens, head_dim]` whose keys are rotated and copied for every worker."""

    def __init__(self, store: BlockStore, rotary: Rotary, workers: int, room: int) -> None:
        self.rotary, self.workers, self.bytes_copied = rotary, workers, 0
        self.lengths = [block.length for block in store.blocks]
        self.keys, self.values = ([_laid_out(store, block, which, room) for block in store.blocks] for which in (0, 1))
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}

    def blocks(self, worker: int) -> list[int]:
        return [0, *(1 + other for other in range(self.workers) if other != worker), 1 + worker]

    def begin(self) -> list[int]:
        """Makes room for the next token of each worker and returns their positions."""
        for worker in range(self.workers):
            self.lengths[1 + worker] += 1
        self.tables.clear()
        return [sum(self.lengths[block] for block in self.blocks(worker)) - 1 for worker in range(self.workers)]

    def write(self, layer: int, worker: int, key: Tensor, value: Tensor) -> None:
        """Writes a token's key, turned by its place in its block, and value, `[kv_heads, head_dim]`."""
        place = self.lengths[1 + worker] - 1
        self.keys[1 + worker][layer][:, place], self.values[1 + worker][layer][:, place] = key, value

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Copies keys and values `[workers, kv_heads, longest view, head_dim]`, padded on the left."""
        parts: dict[tuple[int, int], Tensor] = {}
        longest = max(sum(self.lengths[block] for block in self.blocks(worker)) for worker in range(self.workers))
        shape = self.workers, self.keys[0].shape[1], longest, self.keys[0].shape[3]
        keys, values = (self.keys[0].new_zeros(shape) for _ in range(2))
        for worker in range(self.workers):
            start = longest - sum(self.lengths[block] for block in self.blocks(worker))
            offset = 0
            for block in self.blocks(worker):
                length = self.lengths[block]
                if (block, offset) not in parts:
                    parts[block, offset] = self.turned(self.keys[block][layer][:, :length], offset)
                there = slice(start + offset, start + offset + length)
                keys[worker, :, there] = parts[block, offset]
                values[worker, :, there] = self.values[block][layer][:, :length]
                offset += length
        self.bytes_copied += sum(x.numel() * x.itemsize for x in (keys, values))
        return keys, values

    def turned(self, x: Tensor, positions: int) -> Tensor:
        if positions not in self.tables:
            self.tables[positions] = self.rotary.tables(torch.tensor(positions), x.dtype)
        return self.rotary.turned(x, *self.tables[positions])

    def mask(self) -> Tensor:
        totals = [sum(self.lengths[block] for block in self.blocks(worker)) for worker in range(self.workers)]
        seen = torch.arange(max(totals)) >= max(totals) - torch.tensor(totals)[:, None]
        return seen[:, None, None]


class CopyStep:
    """Takes the place of `ViewStep` within the same packed layers."""

    def __init__(self, views: Views) -> None:
        self.views, self.positions = views, views.begin()
        self.seen = views.mask()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        views = self.views
        for worker in range(views.workers):
            place = views.lengths[1 + worker] - 1
            views.write(layer, worker, views.turned(key[0, :, worker], place), value[0, :, worker])
        queries = torch.stack([views.turned(query[0, :, worker], at) for worker, at in enumerate(self.positions)])
        keys, values = views.read(layer)
        out = nn.functional.scaled_dot_product_attention(
            queries[:, :, None], keys, values, self.seen, scale=scale, enable_gqa=True
        )
        return out.transpose(0, 2)[0].transpose(0, 1)[None]


class CopyCache(DynamicCache):
    """Does the same for the stock model, which has turned the keys by their position in the view."""

    def __init__(self, views: Views) -> None:
        super().__init__()
        self.views, self.positions = views, views.begin()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        for worker, at in enumerate(self.positions):
            back = self.views.lengths[worker + 1] - 1 - at
            key = self.views.turned(key_states[worker, :, 0], back)
            self.views.write(layer_idx, worker, key, value_states[worker, :, 0])
        return self.views.read(layer_idx)


def _laid_out(store: BlockStore, block: CacheBlock, which: int, room: int) -> Tensor:
    """Copies a block's keys or values from its pages, `[layers, kv_heads, length + room, head_dim]`."""
    whole = torch.cat(store.keys if which == 0 else store.values, dim=1)
    pages = whole[:, block.pages].transpose(1, 2).flatten(2, 3)[:, :, : block.length]
    return nn.functional.pad(pages, (0, 0, 0, room)).contiguous()


class Setting:
    """Holds a prompt that was read, and workers that have written some tokens."""

    def __init__(self, model: LocalModel, stock: Any, config: Config, workers: int, turn: int) -> None:
        self.model, self.stock, self.config, self.workers = model, stock, config, workers
        self.rotary, self.store = rotary_of(model), BlockStore(model)
        # Random tokens, because the time of a step does not depend on them.
        draw = torch.Generator().manual_seed(turn)
        self.tokens = torch.randint(1000, 40000, (config.steps, workers), generator=draw).tolist()
        prompt, *own = (self.store.block() for _ in range(1 + workers))
        ids = torch.randint(1000, 40000, (config.prompt_tokens,), generator=draw).tolist()
        for first in range(0, len(ids), 128):
            forward(model, self.rotary, self.store, [Feed([prompt], ids[first : first + 128], asked=False)])
        for number, block in enumerate(own):
            text = torch.randint(1000, 40000, (config.own_tokens - 8 * number,), generator=draw).tolist()
            forward(model, self.rotary, self.store, [Feed([prompt, block], text, asked=False)])
        self.feeds = [[prompt, *(other for other in own if other is not mine), mine] for mine in own]
        copies = (Views(self.store, self.rotary, workers, config.steps) for _ in range(2))
        self.copies, self.stock_copies = copies

    def queries(self, step: int) -> Tensor:
        feeds = [Feed(view, [token]) for view, token in zip(self.feeds, self.tokens[step], strict=True)]
        return forward(self.model, self.rotary, self.store, feeds)

    def keys(self, step: int) -> Tensor:
        attends: Any = CopyStep(self.copies)
        return self.model.forward(self.tokens[step], [0] * self.workers, range(self.workers), attends)

    def stock_keys(self, step: int) -> Tensor:
        cache = CopyCache(self.stock_copies)
        ids, places = torch.tensor([self.tokens[step], cache.positions])[:, :, None]
        mask = self.stock_copies.mask()
        out = self.stock(input_ids=ids, position_ids=places, attention_mask=mask, **{cache_name(self.stock): cache})
        return out.logits[:, -1]


class NewBytes(TorchDispatchMode):
    """Counts the bytes of new tensors."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        new = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given]
        self.total += sum(x.numel() * x.itemsize for x in new)
        return out


SIDES: dict[str, Callable[[Setting, int], Tensor]] = {
    "queries turned": Setting.queries,
    "keys turned and copied": Setting.keys,
    "keys turned and copied, stock layers": Setting.stock_keys,
}
APART = "apart, as samples of one prompt"


def main(config: Config) -> None:
    """Times and writes the files."""
    torch.set_num_threads(config.threads)
    folder = smollm2.folder()
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = LocalEngine(folder, dtype=torch.float32, end_tokens=())
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    wide_model = LocalModel(wide)
    rows: list[dict[str, Any]] = []
    for workers in config.workers:
        seconds: dict[str, list[float]] = {name: [] for name in (*SIDES, APART)}
        worked: dict[str, list[float]] = {name: [] for name in seconds}
        drift: dict[str, list[float]] = {name: [] for name in SIDES}
        settings = list[Setting]()
        for turn in range(config.rounds + 1):
            with torch.inference_mode():
                settings = [Setting(engine.model, stock, config, workers, turn)]
                last = {name: _timed(side, settings[0], seconds[name], worked[name]) for name, side in SIDES.items()}
            _apart(engine, config, workers, turn, seconds[APART], worked[APART])
            for name, logits in last.items():
                drift[name].append(_apart_by(last["queries turned"], logits))
        with torch.inference_mode():
            exact = Setting(wide_model, wide, config, workers, 0)
            drift64 = max(_apart_by(exact.queries(step), exact.keys(step)) for step in range(3))
        rows += _rows(settings[0], seconds, worked, drift, drift64)
    wide_model.close()
    asyncio.run(engine.close())
    _file(config, rows)


def _apart_by(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def _timed(
    side: Callable[[Setting, int], Tensor], setting: Setting, seconds: list[float], worked: list[float]
) -> Tensor:
    begin, busy = time.perf_counter(), time.process_time()
    logits = torch.empty(0)
    for step in range(setting.config.steps):
        logits = side(setting, step)
    seconds.append((time.perf_counter() - begin) / setting.config.steps)
    worked.append((time.process_time() - busy) / setting.config.steps)
    return logits


def _apart(
    engine: LocalEngine, config: Config, workers: int, turn: int, seconds: list[float], worked: list[float]
) -> None:
    """Times as many answers that do not see each other, after a prompt as long as a view is at the end."""
    count = config.prompt_tokens + workers * config.own_tokens
    text = f"Round {turn}." + "".join(f" {n % 10}" for n in range((count - 24) // 2))

    async def ask(num: int, tokens: int) -> None:
        chat, asked = (Message("user", (text,)),), Parameters(max_tokens=tokens)
        await asyncio.gather(
            *(engine.generate(Request(messages=chat, parameters=asked, seed=seed)) for seed in range(num))
        )

    async def run() -> None:
        await ask(1, 1)
        begin, busy = time.perf_counter(), time.process_time()
        await ask(workers, config.steps)
        seconds.append((time.perf_counter() - begin) / config.steps)
        worked.append((time.process_time() - busy) / config.steps)

    asyncio.run(run())


def _rows(
    setting: Setting,
    seconds: dict[str, list[float]],
    worked: dict[str, list[float]],
    drift: dict[str, list[float]],
    drift64: float,
) -> list[dict[str, Any]]:
    # The first round warms up.
    middle = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    busy = {name: statistics.median(taken[1:]) for name, taken in worked.items()}
    model, store = setting.model, setting.store
    new_bytes = {
        "queries turned": _new_bytes_of_attention(setting),
        "keys turned and copied": setting.copies.bytes_copied / setting.config.steps,
        "keys turned and copied, stock layers": setting.stock_copies.bytes_copied / setting.config.steps,
    }
    return [
        {
            "name": name,
            "workers": setting.workers,
            "seconds_median": middle[name],
            "cpu_seconds_median": busy[name],
            "steps_per_cpu_second": 1 / busy[name],
            "tokens_per_cpu_second": setting.workers / busy[name],
            "ratio_to_copying": busy["keys turned and copied"] / busy[name],
            "ratio_to_stock": busy["keys turned and copied, stock layers"] / busy[name],
            "kept_mb": len(store.pages) * PAGE * model.bytes_per_token / 1e6 if name == "queries turned" else None,
            "made_mb_per_step": new_bytes[name] / 1e6 if name in new_bytes else None,
            "view_tokens": sum(block.length for block in store.blocks),
            "drift": drift.get(name),
            "drift_float64": drift64 if name == "keys turned and copied" else None,
            "seconds": seconds[name][1:],
            "cpu_seconds": worked[name][1:],
        }
        for name in seconds
    ]


def _new_bytes_of_attention(setting: Setting) -> int:
    """Returns the bytes of all tensors that attention makes in a step: turned queries, scores and results."""
    feeds = [Feed(view, [token]) for view, token in zip(setting.feeds, setting.tokens[0], strict=True)]
    with torch.inference_mode():
        step = ViewStep(setting.store, setting.rotary, feeds)
        model = setting.model
        heads = setting.stock.config.num_attention_heads
        query = torch.randn(1, heads, setting.workers, model.head_dim)
        key, value = torch.randn(2, 1, model.kv_heads, setting.workers, model.head_dim)
        with NewBytes() as counted:
            step.attend(0, query, key, value, 0.1)
    return counted.total * model.layers


def _file(config: Config, rows: list[dict[str, Any]]) -> None:
    note = (
        f"SmolLM2-135M-Instruct, float32, {config.threads} thread(s): workers read one token each per step after a "
        f"prompt of {config.prompt_tokens} tokens, everybody else's text and their own; the first has written "
        f"{config.own_tokens} tokens, each next one 8 fewer. {config.rounds} rounds of {config.steps} steps, all sides "
        f'in turn in one process, the same tokens for all of them, medians. "Apart" is `LocalEngine` with as many '
        f"samples that do not see each other, after a prompt as long as the views. CPU seconds are the process's, "
        f"because other work on the machine hardly changes them. Kept: keys and values in pages in "
        f'use. Made: keys and values that are laid out anew in each step; of "queries turned" all that its attention '
        f'makes. Drift: largest difference of logits from "queries turned" after {config.steps} steps, relative to the '
        f"largest logit, median and worst of the rounds; in float64, the worst of three steps (the model's norms round "
        f"to float32 all the same, so 0 says that no rounding came out otherwise). The texts are random tokens, on "
        f"some of which any two sides in float32 part further. Load average at the end: {os.getloadavg()[0]:.1f}."
    )
    columns = ("workers", "side", "CPU ms per step", "ms per step", "tokens per CPU s")
    columns += ("to copying", "to stock layers", "kept, MB", "made per step, MB", "drift", "worst", "in float64")
    lines = [
        (
            row["workers"],
            row["name"],
            f"{1e3 * row['cpu_seconds_median']:.0f}",
            f"{1e3 * row['seconds_median']:.0f}",
            f"{row['tokens_per_cpu_second']:.1f}",
            f"{row['ratio_to_copying']:.2f}x",
            f"{row['ratio_to_stock']:.2f}x",
            "" if row["kept_mb"] is None else f"{row['kept_mb']:.1f}",
            "" if row["made_mb_per_step"] is None else f"{row['made_mb_per_step']:.1f}",
            *(
                f"{pick(row['drift']):.1e}" if row["name"] in list(SIDES)[1:] else ""
                for pick in (statistics.median, max)
            ),
            "" if row["drift_float64"] is None else f"{row['drift_float64']:.1e}",
        )
        for row in rows
    ]
    table = markdown_table(columns, lines)
    file_result(config.out, __file__, rows, "Workers that see each other", note, table)


if __name__ == "__main__":
    main(tyro.cli(Config))
