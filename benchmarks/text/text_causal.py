"""Times causal decoding in this process, all ways in turn: ``python benchmarks/text/text_causal.py``.

SmolLM2-135M answers one prompt at a time, greedily: `decode`, transformers' `generate`, both with guesses, and
`LocalEngine` with weights in float32, int8 and int4. The table has medians of ratios to `generate` in the same round.
"""

from __future__ import annotations

import asyncio
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
from partsong import SpeculativeDecoder, decode, load_text_model
from partsong.reasoning import Message, Parameters, Request
from partsong.reasoning.local import LocalEngine, smollm2
from partsong.reasoning.local.prompt import prompt_ids

#: Answers a prompt and returns the answer's tokens, or how many they are.
Side = Callable[[str], list[int] | int]
PLAIN = "generate"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to time."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    new_tokens: int = 48
    """Most tokens of an answer."""
    rounds: int = 5
    """Rounds; medians count."""
    threads: int = 1
    """Threads of torch, for all sides."""


def chat(prompt: str) -> tuple[Message, ...]:
    """Makes a conversation of a prompt."""
    return (Message("user", (prompt,)),)


def engine_side(weights: Any, config: Config) -> tuple[LocalEngine, Side]:
    """Answers with an engine."""
    engine = LocalEngine("smollm2-135m", weights=weights, cache_mb=0)
    parameters = Parameters(max_tokens=config.new_tokens, temperature=0.0)

    def answer(prompt: str) -> int:
        return asyncio.run(
            engine.generate(Request(messages=chat(prompt), parameters=parameters, seed=0))
        ).usage.completion

    return engine, answer


def sides_of(config: Config) -> dict[str, Side]:
    """Makes all sides."""
    engines = {name: engine_side(name, config) for name in (None, "int8", "int4")}
    tokenizer, module = (
        engines[None][0].tokenizer,
        AutoModelForCausalLM.from_pretrained(smollm2.folder(), dtype=torch.float32),
    )
    model: Any = module.eval()
    text_model = load_text_model(model)

    def generating(**more: Any) -> Side:
        def answer(prompt: str) -> list[int]:
            ids = torch.tensor([prompt_ids(tokenizer, chat(prompt))])
            options = {"do_sample": False, "max_new_tokens": config.new_tokens, "pad_token_id": 0, **more}
            return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()

        return answer

    def decoding(speculate: Any) -> Side:
        def answer(prompt: str) -> list[int]:
            ids = [prompt_ids(tokenizer, chat(prompt))]
            return decode(text_model, ids, max_new_tokens=config.new_tokens, speculate=speculate).tokens[0]

        return answer

    sides = {PLAIN: generating(), "decode": decoding(None), "decode, ngram": decoding("ngram")}
    sides["generate, SpeculativeDecoder('ngram')"] = generating(custom_generate=SpeculativeDecoder())
    sides["generate, prompt_lookup_num_tokens=10"] = generating(prompt_lookup_num_tokens=10)
    return sides | {f"LocalEngine, {name or 'float32'}": side for name, (_, side) in engines.items()}


def main(config: Config) -> None:
    """Times and writes the files."""
    torch.set_num_threads(config.threads)
    sides, rows = sides_of(config), list[dict[str, Any]]()
    for kind, prompts in PROMPTS.items():
        rates, same = {name: list[float]() for name in sides}, dict.fromkeys(sides, True)
        for turn in range(config.rounds + 1):
            texts = dict[str, list[int] | int]()
            for name, side in sides.items():
                begin = time.perf_counter()
                texts[name] = answer = side(prompts[0])
                if turn:  # the first round warms up
                    tokens = answer if isinstance(answer, int) else len(answer)
                    rates[name].append(tokens / (time.perf_counter() - begin))
                same[name] &= texts[name] == texts[PLAIN]
        for name in sides:
            ratio = statistics.median(a / b for a, b in zip(rates[name], rates[PLAIN], strict=True))
            row = {"name": name, "size": kind, "tokens_per_second": statistics.median(rates[name]), "ratio": ratio}
            row["spread"] = spread(rates[name])
            rows.append(row | {"same_text": "" if name.startswith("Local") else same[name]})
            print(rows[-1], flush=True)
    columns = list(rows[0])
    shown = [[f"{row[c]:.2f}" if isinstance(row[c], float) else row[c] for c in columns] for row in rows]
    note = (
        f"SmolLM2-135M on a CPU, one prompt, at most {config.new_tokens} tokens, greedy, {config.rounds} interleaved "
        f"rounds after one to warm up, {config.threads} thread{'s' if config.threads > 1 else ''} of torch on every "
        f"side; the time includes reading the prompt. `ratio` is to `generate`. int8 and int4 are other models."
    )
    spreads = {f"{PLAIN}, {row['size']}": row["spread"] for row in rows if row["name"] == PLAIN}
    table = markdown_table(columns, shown)
    file_result(config.out, __file__, rows, "Causal decoding", note, table, spreads=spreads)


if __name__ == "__main__":
    main(tyro.cli(Config))
