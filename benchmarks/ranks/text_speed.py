"""Measures what a second process brings a language model: ``python -m benchmarks.ranks.text_speed``.

SmolLM2-135M answers 1 and 16 calls at a time, on one rank with one thread, on one with two threads, and on two ranks
with one thread each, in turns.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.reasoning import Message, Parameters, RanksEngine, Request

PROMPT = "Explain in a few sentences how a bicycle stays upright while it moves."
#: What is timed. One rank is a process of its own too, so that a call costs all sides the same.
SIDES: dict[str, dict[str, Any]] = {
    "1 rank, 1 thread": {"nproc": 1, "threads": 1},
    "1 rank, 2 threads": {"nproc": 1, "threads": 2},
    "2 ranks, tensor-parallel": {"nproc": 2, "threads": 1},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    together: tuple[int, ...] = (1, 16)
    """Calls at a time."""
    new_tokens: int = 64
    """Tokens of an answer."""
    rounds: int = 5
    """Rounds; medians count."""


async def answers(engine: RanksEngine, config: Config, together: int) -> float:
    """Returns tokens per second of some calls at a time, which all have their own seeds."""
    asked = Parameters(max_tokens=config.new_tokens, temperature=1.0)
    chat = (Message("user", (PROMPT,)),)
    requests = [Request(messages=chat, parameters=asked, seed=number) for number in range(together)]
    begin = time.perf_counter()
    done = await asyncio.gather(*map(engine.generate, requests))
    return sum(each.usage.completion for each in done) / (time.perf_counter() - begin)


async def measured(config: Config) -> list[dict[str, Any]]:
    """Times all sides in turns."""
    engines = {name: RanksEngine("smollm2-135m", cache_mb=0, end_tokens=(), **how) for name, how in SIDES.items()}
    rates: dict[tuple[str, int], list[float]] = {(name, num): [] for name in engines for num in config.together}
    for turn in range(config.rounds + 1):
        for (name, num), seen in rates.items():
            rate = await answers(engines[name], config, num)
            if turn:  # the first round warms up
                seen.append(rate)
    for engine in engines.values():
        await engine.close()
    first = next(iter(SIDES))
    return [
        {
            "side": name,
            "together": num,
            "tokens_per_second": statistics.median(seen),
            "ratio": statistics.median(a / b for a, b in zip(seen, rates[first, num], strict=True)),
            "rates": seen,
        }
        for (name, num), seen in rates.items()
    ]


def main(config: Config) -> None:
    """Times all sides and files the table."""
    rows = asyncio.run(measured(config))
    columns = ("calls at a time", "side", "tokens per second", "times the first")
    order = sorted(rows, key=lambda row: row["together"])
    lines = [(row["together"], row["side"], f"{row['tokens_per_second']:.1f}", f"{row['ratio']:.2f}") for row in order]
    note = (
        f"SmolLM2-135M in float32, answers of {config.new_tokens} tokens, the prompt computed anew each time; medians "
        f"of {config.rounds} rounds in which all sides take turns, ratios within a round. One rank packs all weights; "
        "of two each has a part of every layer, and they add up states twice a layer and gather the logits."
    )
    file_result(config.out, __file__, rows, "A language model on two ranks", note, markdown_table(columns, lines))


if __name__ == "__main__":
    main(tyro.cli(Config))
