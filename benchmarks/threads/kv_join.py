"""Times threads that join against a plain batch: ``python benchmarks/threads/kv_join.py``.

All sides write the same number of tokens, and every round has another prompt.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.threads.kv_fork import chat_of
from partsong.reasoning import Completion, Message, Parameters, Request
from partsong.reasoning.calls.text_tree import Fork
from partsong.reasoning.local import LocalEngine, smollm2
from partsong.reasoning.local.prompt import prompt_ids
from partsong.reasoning.threads import FORMATS


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to time."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    paths: int = 8
    """How many threads, and how many answers of the plain batch."""
    prompt_tokens: int = 256
    """Tokens of the prompt."""
    batch_tokens: int = 64
    """Tokens of each answer of the plain batch."""
    summary_tokens: tuple[int, ...] = (16, 32, 64)
    """Tokens of the text after the threads, which share the rest of the batch's tokens."""
    rounds: int = 5
    """Rounds; the median counts."""
    threads: int = 1
    """Threads of torch."""
    dtype: str = "float32"
    """Type of the weights."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Holds what one side took in one round: wall and CPU seconds, prompt tokens computed, tokens drawn."""

    seconds: float
    cpu_seconds: float
    prefill: int
    drawn: int


class Sides:
    """Runs all sides on one engine.

    Args:
        engine: on which all sides run.
        config: sizes.
    """

    def __init__(self, engine: LocalEngine, config: Config) -> None:
        self.engine, self.config = engine, config

    async def batch(self, chat: tuple[Message, ...], turn: int) -> list[Completion]:
        """Writes answers that do not see each other."""
        return await self._ask([chat] * self.config.paths, self.config.batch_tokens, turn)

    async def threads(self, chat: tuple[Message, ...], turn: int, summary: int, joined: bool) -> list[Completion]:
        """Writes threads and a text that has read them, either from their joined keys or by reading them again."""
        form, paths = FORMATS["parathinker"], range(1, self.config.paths + 1)
        opened = [form.thread_open.format(number=i) for i in paths]
        tokens = (self.config.paths * self.config.batch_tokens - summary) // self.config.paths
        begun = [
            [*chat, Message("assistant", (Fork(((text,),), (i,)),))] for i, text in zip(paths, opened, strict=True)
        ]
        threads = await self._ask(begun, tokens, turn)
        parts = [
            (text, each.piece if joined else each.text, form.thread_close.format(number=i))
            for i, text, each in zip(paths, opened, threads, strict=True)
        ]
        whole = (Fork(tuple(parts), tuple(paths)),) if joined else tuple(text for part in parts for text in part)
        last = await self._ask([[*chat, Message("assistant", (*whole, form.join))]], summary, turn)
        return [*threads, *last]

    async def _ask(self, chats: Sequence[Sequence[Message]], tokens: int, turn: int) -> list[Completion]:
        # With a stop string, even one that never comes, the engine keeps short texts, which may be continued.
        parameters = Parameters(max_tokens=tokens, stop=("\0",))
        requests = [
            Request(messages=tuple(chat), parameters=parameters, seed=100 * turn + i, sample=i)
            for i, chat in enumerate(chats)
        ]
        return list(await asyncio.gather(*map(self.engine.generate, requests)))


def main(config: Config) -> None:
    """Times and writes the files."""
    torch.set_num_threads(config.threads)
    engine = LocalEngine(smollm2.folder(), dtype=getattr(torch, config.dtype), end_tokens=())
    taken = asyncio.run(_rounds(engine, config))
    middle = {name: statistics.median(each.seconds for each in rounds) for name, rounds in taken.items()}
    batch = middle["plain batch"]
    rows = [
        {
            "name": name,
            "seconds_median": middle[name],
            "ratio_to_batch": middle[name] / batch,
            "cpu_seconds_median": statistics.median(each.cpu_seconds for each in rounds),
            "prefill": rounds[0].prefill,
            "tokens": rounds[0].drawn,
            "seconds": [each.seconds for each in rounds],
        }
        for name, rounds in taken.items()
    ]
    note = (
        f"SmolLM2-135M-Instruct, {config.dtype}, {config.threads} thread(s): {config.paths} threads on a prompt of "
        f"{config.prompt_tokens} tokens and a text after them, against {config.paths} answers of "
        f"{config.batch_tokens} tokens in a plain batch; {config.rounds} rounds, all sides in turn on one "
        f"`LocalEngine`, medians. Prefill counts the tokens of prompts that were computed; rounding the threads' "
        f"lengths down leaves out less than one token per thread. Load average at the end: {os.getloadavg()[0]:.1f}."
    )
    columns = ("side", "tokens", "prefill", "s", "CPU s", "to the batch")
    lines = [
        (
            row["name"],
            row["tokens"],
            row["prefill"],
            f"{row['seconds_median']:.2f}",
            f"{row['cpu_seconds_median']:.2f}",
            f"{row['ratio_to_batch']:.2f}x",
        )
        for row in rows
    ]
    table = markdown_table(columns, lines)
    file_result(config.out, __file__, rows, "Threads that join", note, table)


async def _rounds(engine: LocalEngine, config: Config) -> dict[str, list[Taken]]:
    sides: dict[str, Any] = {"plain batch": Sides(engine, config).batch}
    for summary in config.summary_tokens:
        for joined in (True, False):
            what = "keys joined" if joined else "read again"

            def threads(chat: Any, turn: int, summary: int = summary, joined: bool = joined) -> Any:
                return Sides(engine, config).threads(chat, turn, summary, joined)

            sides[f"{config.paths} threads and {summary} tokens, {what}"] = threads
    taken: dict[str, list[Taken]] = {name: [] for name in sides}
    for turn in range(config.rounds + 1):
        for number, (name, side) in enumerate(sides.items()):
            # Every side has another prompt, so that it finds no keys of the others.
            chat = chat_of(engine.tokenizer, config.prompt_tokens, len(sides) * turn + number)
            begin, busy = time.perf_counter(), time.process_time()
            completions: list[Completion] = await side(chat, turn)
            spent = time.perf_counter() - begin, time.process_time() - busy
            computed = sum(each.usage.prompt - each.usage.cached for each in completions)
            # The first round warms up.
            if turn:
                drawn = sum(each.usage.completion for each in completions)
                taken[name].append(Taken(seconds=spent[0], cpu_seconds=spent[1], prefill=computed, drawn=drawn))
    assert len(prompt_ids(engine.tokenizer, chat)) == config.prompt_tokens
    await engine.close()
    return taken


if __name__ == "__main__":
    main(tyro.cli(Config))
