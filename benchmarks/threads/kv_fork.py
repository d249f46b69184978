"""Times branches of one prompt, all sides in turn: ``python benchmarks/threads/kv_fork.py``.

Every round has another prompt, so that no side profits from the round before. Every answer has exactly as many tokens
as asked for.
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
from transformers import AutoModelForCausalLM

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.speculation.vllm_peer import VllmPeer
from partsong.reasoning import Message, Parameters, Request
from partsong.reasoning.local import LocalEngine, smollm2
from partsong.reasoning.local.packed_linear import can_pack
from partsong.reasoning.local.prompt import prompt_ids


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to time."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    branches: int = 8
    """How many answers to the prompt."""
    prompt_tokens: int = 256
    """Tokens of the prompt."""
    new_tokens: int = 64
    """Tokens of each answer."""
    rounds: int = 5
    """Rounds; the median counts."""
    threads: int = 1
    """Threads of torch, for all sides."""
    dtype: str = "float32"
    """Type of the weights, for all sides."""
    vllm: Path | None = None
    """The python of an environment that has vLLM, which is then timed too."""


#: Returns the seconds that all branches of a prompt take; the argument is the number of the round.
Side = Callable[[list[int], tuple[Message, ...], int], float]


def main(config: Config) -> None:
    """Times and writes the files."""
    torch.set_num_threads(config.threads)
    dtype = getattr(torch, config.dtype)
    folder = smollm2.folder()
    engines = {
        "LocalEngine": LocalEngine(folder, dtype=dtype, cache_mb=0, end_tokens=()),
        "LocalEngine, plain weights": LocalEngine(folder, dtype=dtype, cache_mb=0, end_tokens=(), pack=False),
    }
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    sides: dict[str, Side] = {
        "generate, one after the other": lambda ids, chat, turn: _one_by_one(model, ids, config, turn),
        "generate, num_return_sequences": lambda ids, chat, turn: _generated(model, ids, config, config.branches, turn),
        **{name: _branches(engine, config) for name, engine in engines.items()},
    }
    options = {"model": str(folder), "dtype": config.dtype}
    peer = None if config.vllm is None else VllmPeer(config.vllm, config.threads, options)
    if peer is not None:
        sides["vLLM"] = _vllm_side(peer, config)
    tokenizer = engines["LocalEngine"].tokenizer
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    worked: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(config.rounds + 1):
        chat = chat_of(tokenizer, config.prompt_tokens, turn)
        ids = prompt_ids(tokenizer, chat)
        for name, side in sides.items():
            busy = time.process_time()
            taken = side(ids, chat, turn)
            # The first round warms up.
            if turn:
                seconds[name].append(taken)
                worked[name].append(time.process_time() - busy)
    for engine in engines.values():
        asyncio.run(engine.close())
    if peer is not None:
        peer.close()
        worked["vLLM"] = []
    _file(config, seconds, worked)


def chat_of(tokenizer: Any, length: int, turn: int) -> tuple[Message, ...]:
    """Makes a prompt of exactly `length` tokens that no other round has."""
    for words in range(length):
        for more in range(16):
            text = f"Round {turn}." + "".join(f" Item {n} costs {3 * n + turn}." for n in range(words)) + " a" * more
            chat = (Message("user", (text,)),)
            if len(prompt_ids(tokenizer, chat)) == length:
                return chat
    raise SystemExit(f"no prompt of {length} tokens can be made")


def _generated(model: Any, ids: list[int], config: Config, num: int, seed: int) -> float:
    torch.manual_seed(seed)
    begin = time.perf_counter()
    with torch.inference_mode():
        tokens = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=True,
            top_k=0,
            num_return_sequences=num,
            max_new_tokens=config.new_tokens,
            min_new_tokens=config.new_tokens,
        )
    assert tokens.shape == (num, len(ids) + config.new_tokens)
    return time.perf_counter() - begin


def _one_by_one(model: Any, ids: list[int], config: Config, turn: int) -> float:
    return sum(_generated(model, ids, config, 1, 100 * turn + branch) for branch in range(config.branches))


def _branches(engine: LocalEngine, config: Config) -> Side:
    parameters = Parameters(max_tokens=config.new_tokens)

    async def ask(chat: tuple[Message, ...], turn: int) -> int:
        requests = [
            Request(messages=chat, parameters=parameters, seed=100 * turn + branch) for branch in range(config.branches)
        ]
        completions = await asyncio.gather(*map(engine.generate, requests))
        return sum(completion.usage.completion for completion in completions)

    def run(ids: list[int], chat: tuple[Message, ...], turn: int) -> float:
        begin = time.perf_counter()
        assert asyncio.run(ask(chat, turn)) == config.branches * config.new_tokens
        return time.perf_counter() - begin

    return run


def _vllm_side(peer: VllmPeer, config: Config) -> Side:
    sampling = {"n": config.branches, "max_tokens": config.new_tokens, "temperature": 1.0, "ignore_eos": True}

    def run(ids: list[int], chat: tuple[Message, ...], turn: int) -> float:
        seconds, tokens = peer.ask(ids, {**sampling, "seed": turn})
        assert tokens == config.branches * config.new_tokens
        return seconds

    return run


def _file(config: Config, seconds: dict[str, list[float]], worked: dict[str, list[float]]) -> None:
    tokens = config.branches * config.new_tokens
    middle = {name: statistics.median(taken) for name, taken in seconds.items()}
    single, batched = (middle[name] for name in list(middle)[:2])
    rows = [
        {
            "name": name,
            "seconds_median": middle[name],
            "tokens_per_second": tokens / middle[name],
            "ratio_to_sequential": single / middle[name],
            "ratio_to_batched": batched / middle[name],
            "seconds": seconds[name],
            "cpu_seconds": worked[name],
        }
        for name in seconds
    ]
    able, why = can_pack(torch.empty(0, dtype=getattr(torch, config.dtype)))
    note = (
        f"SmolLM2-135M-Instruct, {config.dtype}, {config.threads} thread(s): {config.branches} sampled answers of "
        f"{config.new_tokens} tokens to one prompt of {config.prompt_tokens} tokens, {config.rounds} rounds, all sides "
        f"in turn in one process (vLLM in its own), medians. `generate` is transformers' own, with its cache. CPU "
        f"seconds are the process's, because other work on the machine hardly changes them. "
        f"{'`LocalEngine` packs its weights.' if able else f'No side packs its weights: {why}.'} "
        f"Load average at the end: {os.getloadavg()[0]:.1f}."
    )
    columns = ("side", "s", "CPU s", "tokens/s", "to one after the other", "to num_return_sequences")
    lines = [
        (
            row["name"],
            f"{row['seconds_median']:.2f}",
            f"{statistics.median(row['cpu_seconds']):.2f}" if row["cpu_seconds"] else "",
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio_to_sequential']:.2f}x",
            f"{row['ratio_to_batched']:.2f}x",
        )
        for row in rows
    ]
    table = markdown_table(columns, lines)
    file_result(config.out, __file__, rows, "Branches of one prompt", note, table)


if __name__ == "__main__":
    main(tyro.cli(Config))
