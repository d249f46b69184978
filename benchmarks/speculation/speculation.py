"""Times decoding with drafts, all sides in turn: ``python benchmarks/speculation/speculation.py``.

SmolLM2-135M answers prompts of three kinds, greedily, so that every side writes the same tokens but for rounding. The
seconds of a side are those of its tokens; the table has medians of ratios to `LocalEngine` without drafts in the same
round. ``--costs`` times steps over several tokens instead.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import AutoModelForCausalLM

from benchmarks.filing import file_result, markdown_table, result_path, spread
from benchmarks.speculation.speculation_prompts import PROMPTS
from benchmarks.speculation.vllm_peer import VllmPeer
from partsong.kernels.speculation import DraftTree
from partsong.reasoning import Message, Parameters, RanksEngine, Request
from partsong.reasoning.local import LocalEngine, smollm2
from partsong.reasoning.local.batch import Batch
from partsong.reasoning.local.batch_feed import BatchRow
from partsong.reasoning.local.loading import load
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prefix_tree import PrefixTree
from partsong.reasoning.local.prompt import prompt_ids

PLAIN = "LocalEngine"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to time."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    new_tokens: int = 64
    """Most tokens of an answer."""
    rounds: int = 5
    """Rounds; medians count."""
    prompts: int = 5
    """Prompts of each kind, five at most."""
    threads: int = 1
    """Threads of torch, for all sides."""
    batch: int = 1
    """Samples of a prompt that are written together; above 1 at temperature 0.7."""
    vllm: Path | None = None
    """The python of an environment that has vLLM, which is then timed too."""
    ranks: bool = False
    """Time two ranks with the weights shared out between them, too, with as many threads each."""
    early_exit: bool = True
    """Time `generate` with its own first layers as the assistant too, which takes ten times as long as the others."""
    costs: bool = False
    """Time steps over 1 to 64 tokens, with packed and with plain weights."""


#: Answers a prompt and returns how many tokens the answer has.
Side = Callable[[str], int]


def engine_side(engine: Any, config: Config) -> Side:
    """Answers with an engine."""
    parameters = Parameters(max_tokens=config.new_tokens, temperature=0.0 if config.batch == 1 else 0.7)

    async def answer(prompt: str) -> int:
        message = (Message("user", (prompt,)),)
        requests = [Request(messages=message, parameters=parameters, seed=seed) for seed in range(config.batch)]
        answers = await asyncio.gather(*map(engine.generate, requests))
        return sum(each.usage.completion for each in answers)

    runner = asyncio.Runner()  # an engine of ranks stays with the loop it began in
    return lambda prompt: runner.run(answer(prompt))


def generate_side(model: Any, tokenizer: Any, config: Config, **more: Any) -> Side:
    """Answers with transformers' own loop."""

    def answer(prompt: str) -> int:
        ids = torch.tensor([prompt_ids(tokenizer, (Message("user", (prompt,)),))])
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": config.new_tokens, "pad_token_id": 0}
        if config.batch > 1:
            options |= {"do_sample": True, "temperature": 0.7, "num_return_sequences": config.batch}
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **more)
        # A sample that has ended is filled up with token 0.
        return int((out[:, ids.shape[1] :] != 0).sum())

    return answer


def vllm_side(tokenizer: Any, config: Config, **more: Any) -> Side:
    """Answers with vLLM in a process of its own."""
    assert config.vllm is not None
    options = {"model": str(smollm2.folder()), "dtype": "float32", "enable_prefix_caching": False, **more}
    peer = VllmPeer(config.vllm, config.threads, options)
    sampling = {"temperature": 0.0, "max_tokens": config.new_tokens}
    if config.batch > 1:
        sampling |= {"temperature": 0.7, "n": config.batch}
    return lambda prompt: peer.ask(prompt_ids(tokenizer, (Message("user", (prompt,)),)), sampling)[1]


def sides_of(config: Config) -> dict[str, Side]:
    """Makes all sides; the others are compared with the first one."""
    drafters: dict[str, Any] = {
        PLAIN: None,
        "LocalEngine, ngram": "ngram",
        "LocalEngine, ngram + jacobi": ["ngram", "jacobi"],
    }
    engines = {name: LocalEngine("smollm2-135m", speculate=each, cache_mb=0) for name, each in drafters.items()}
    sides = {name: engine_side(engine, config) for name, engine in engines.items()}
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2.folder(), dtype=torch.float32).eval()
    tokenizer = engines[PLAIN].tokenizer
    sides["generate"] = generate_side(model, tokenizer, config)
    if config.batch == 1:
        # There is no smaller model of this vocabulary, so the model's first layers assist it.
        peers = [{"prompt_lookup_num_tokens": 10}, *([{"assistant_early_exit": 10}] if config.early_exit else [])]
        for peer in peers:
            sides[f"generate, {'='.join(map(str, *peer.items()))}"] = generate_side(model, tokenizer, config, **peer)
    if config.ranks:
        two = RanksEngine("smollm2-135m", cache_mb=0, nproc=2, threads=config.threads)
        sides["two ranks, tensor-parallel"] = engine_side(two, config)
    if config.vllm is not None:
        ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
        sides["vLLM"] = vllm_side(tokenizer, config)
        sides["vLLM, ngram"] = vllm_side(tokenizer, config, speculative_config=ngram)
    return sides


def race(config: Config) -> list[dict[str, Any]]:
    """Lets every side answer every prompt, in turn."""
    sides, rows = sides_of(config), list[dict[str, Any]]()
    for kind, prompts in ((kind, every[: config.prompts]) for kind, every in PROMPTS.items()):
        rates: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in sides}
        for turn in range(config.rounds + 1):
            for number, prompt in enumerate(prompts):
                for name, side in sides.items():
                    begin = time.perf_counter()
                    tokens = side(prompt)
                    if turn:  # the first round warms up
                        rates[name][number].append(tokens / (time.perf_counter() - begin))
        for name in sides:
            ratios = [
                statistics.median(a / b for a, b in zip(own, plain, strict=True))
                for own, plain in zip(rates[name], rates[PLAIN], strict=True)
            ]
            rows.append(
                {
                    "name": name,
                    "size": kind,
                    "batch": config.batch,
                    "tokens_per_second": statistics.median(rate for own in rates[name] for rate in own),
                    "ratio_to_plain": statistics.geometric_mean(ratios),
                    "lowest": min(ratios),
                    "highest": max(ratios),
                    "spread": statistics.median(map(spread, rates[name])),
                }
            )
            print(rows[-1], flush=True)
    return rows


def costs(config: Config) -> list[dict[str, Any]]:
    """Times steps of one row over several tokens, on 128 cached ones."""
    rows = []
    for pack in (None, False):
        model = LocalModel(load("smollm2-135m", None, torch.float32, "cpu").module, pack=pack, owned=True)
        seconds: dict[int, list[float]] = {tokens: [] for tokens in (1, 2, 4, 8, 9, 16, 25, 64)}
        with torch.inference_mode():
            batch: Batch[BatchRow] = Batch(model)
            tree = PrefixTree(model.room_for, 1000, batch.note_cut)
            node, _ = tree.place(list(range(100, 228)))
            batch.forward([(node, 128)])
            node.done = 128
            batch.join(BatchRow(node, 5))
            dice = random.Random(0)
            for _ in range(4 * config.rounds):
                # In any order: a step after a long one has colder caches.
                for tokens, own in dice.sample(list(seconds.items()), len(seconds)):
                    begin = time.perf_counter()
                    batch.forward([], [DraftTree.chain(range(5, 4 + tokens))])
                    own.append(time.perf_counter() - begin)
        for tokens, own in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(own, seconds[1], strict=True))
            rows.append(
                {
                    "name": f"{'packed' if model.packed else 'plain'} weights",
                    "size": f"{tokens} tokens",
                    "milliseconds": 1e3 * statistics.median(own),
                    "ratio_to_one": ratio,
                }
            )
    return rows


def main(config: Config) -> None:
    """Times and writes the files."""
    torch.set_num_threads(config.threads)
    rows = costs(config) if config.costs else race(config)
    columns = [column for column in rows[0] if column != "batch"]
    shown = [[f"{row[c]:.2f}" if isinstance(row[c], float) else row[c] for c in columns] for row in rows]
    threads = f"{config.threads} thread{'s' if config.threads > 1 else ''} of torch on every side, float32."
    if config.costs:
        title, note = (
            "What a step over several tokens costs",
            f"One row of SmolLM2-135M on 128 cached tokens; {threads}",
        )
    else:
        title = "Decoding with drafts"
        note = (
            f"SmolLM2-135M, at most {config.new_tokens} tokens, {config.rounds} interleaved rounds after one to warm "
            f"up, {'greedy' if config.batch == 1 else f'{config.batch} samples at T=0.7'}; {threads} "
            f"`ratio_to_plain` is the geometric mean over {config.prompts} prompts of a kind, each the median of its "
            "rounds; `lowest` and `highest` are those of single prompts. `spread` says within what share of their "
            "median the middle half of a prompt's times lie."
        )
    spreads = {f"{PLAIN}, {row['size']}": row["spread"] for row in rows if row["name"] == PLAIN}
    table = markdown_table(columns, shown)
    file_result(config.out, __file__, rows, title, note, table, spreads=spreads)


if __name__ == "__main__":
    main(tyro.cli(Config))
