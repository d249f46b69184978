"""Times trained heads against plain decoding: ``python benchmarks/speculation/speculation_heads.py``.

Every round asks all sides the same new prompts, in turn. One side is the head with its likeliest guesses instead of
those drawn with the text's noise.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.reasoning import Completion, Message, Parameters, Request
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.local.speculation.head import TrainedHead
from partsong.seeds import derive
from partsong_zoo.heads import prompts_of

#: Who guesses, by the name of the side.
SIDES: dict[str, Any] = {
    "plain": None,
    "head": TrainedHead(),
    "head, likeliest guesses": TrainedHead(heat=0),
    "ngram": "ngram",
    "jacobi": "jacobi",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to time."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    models: tuple[str, ...] = ("lists-ar", "sums")
    """Models of the zoo that have heads."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Temperatures."""
    batches: tuple[int, ...] = (1, 8)
    """How many prompts are asked at the same time."""
    prompts: int = 26
    """New prompts of a round."""
    rounds: int = 7
    """Rounds; the medians count."""
    threads: int = 1
    """Threads of torch."""


@dataclass(slots=True)
class Side:
    """Holds the measurements of a side.

    Attributes:
        engine: its engine.
        wall: seconds of each round.
        cpu: seconds of each round in which the processor worked for it.
        answers: all answers.
        forwards: how many forwards there were.
        rows: how many rows these had.
    """

    engine: LocalEngine
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    answers: list[Completion] = field(default_factory=list)
    forwards: int = 0
    rows: int = 0


def main(config: Config) -> None:
    """Times and writes the files."""
    torch.set_num_threads(config.threads)
    rows = [
        row
        for model in config.models
        for temperature in config.temperatures
        for batch in config.batches
        for row in measure(config, model, temperature, batch)
    ]
    columns = ["model", "T", "batch", "side", "tokens a forward", "rows a forward", "right of guessed"]
    columns += ["wall time", "processor time"]
    table = markdown_table(columns, [line_of(row) for row in rows])
    note = (
        "Tokens a forward: those of answers, without the first, by forwards, without those that read a prompt (at "
        "batch 1). Wall and processor time: plain by this side, the median of rounds in which all sides answered the "
        "same prompts; reading these is part of it. The texts of all sides were the same."
    )
    file_result(config.out, __file__, rows, "Trained heads as drafters", note, table)


def measure(config: Config, model: str, temperature: float, batch: int) -> list[dict[str, Any]]:
    """Times all sides at one setting."""
    sides = {name: side_of(model, who) for name, who in SIDES.items() if temperature or who != TrainedHead(heat=0)}
    for number in range(config.rounds + 1):
        requests = requests_of(config, model, temperature, number)
        for side in sides.values():
            asyncio.run(ask(side, requests, batch))
        if number == 0:  # the first round warms up
            for side in sides.values():
                side.forwards = side.rows = 0
                for kept in (side.wall, side.cpu, side.answers):
                    kept.clear()
    plain = sides["plain"]
    return [
        {"model": model, "temperature": temperature, "batch": batch, "side": name, **results(side, plain, batch)}
        for name, side in sides.items()
    ]


def side_of(model: str, who: Any) -> Side:
    """Makes an engine whose forwards are counted."""
    side = Side(LocalEngine(model, speculate=who))
    local: Any = side.engine.model
    for name in ("forward", "look"):
        setattr(local, name, counted(side, getattr(local, name)))
    return side


def counted(side: Side, function: Any) -> Any:
    """Counts the calls of a function and their rows."""

    def call(tokens: list[int], *more: Any, **options: Any) -> Any:
        side.forwards += 1
        side.rows += len(tokens)
        return function(tokens, *more, **options)

    return call


def requests_of(config: Config, model: str, temperature: float, number: int) -> list[Request]:
    """Makes the requests of a round; none of its prompts was used before."""
    texts = prompts_of(model, config.prompts, seed=1000 + number, fresh=True)
    parameters = Parameters(max_tokens=96, temperature=temperature)
    return [
        Request(messages=(Message("user", (text,)),), parameters=parameters, seed=derive(number, "round", index))
        for index, text in enumerate(texts)
    ]


async def ask(side: Side, requests: list[Request], batch: int) -> None:
    """Asks a round's requests, `batch` at a time, and times them."""
    answers, wall, cpu = list[Completion](), time.perf_counter(), time.process_time()
    for first in range(0, len(requests), batch):
        answers += await asyncio.gather(*map(side.engine.generate, requests[first : first + batch]))
    side.wall.append(time.perf_counter() - wall)
    side.cpu.append(time.process_time() - cpu)
    side.answers += answers


def results(side: Side, plain: Side, batch: int) -> dict[str, Any]:
    """Returns the results of a side."""
    texts = [[answer.text for answer in each.answers] for each in (side, plain)]
    later = sum(answer.usage.completion - 1 for answer in side.answers)
    drafted, rejected = (
        sum(getattr(answer.usage, name) for answer in side.answers) for name in ("drafted", "rejected")
    )
    forwards = side.forwards - (len(side.answers) if batch == 1 else 0)
    return {
        "different_texts": sum(one != other for one, other in zip(*texts, strict=True)),
        "tokens": later,
        "tokens_per_forward": round(later / forwards, 2),
        "rows_per_forward": round(side.rows / side.forwards, 1),
        "drafted": drafted,
        "right": drafted - rejected,
        "wall_ratio": round(statistics.median(b / a for a, b in zip(side.wall, plain.wall, strict=True)), 2),
        "cpu_ratio": round(statistics.median(b / a for a, b in zip(side.cpu, plain.cpu, strict=True)), 2),
        "wall_seconds": [round(each, 4) for each in side.wall],
        "cpu_seconds": [round(each, 4) for each in side.cpu],
    }


def line_of(row: dict[str, Any]) -> list[object]:
    """Returns a row of the table."""
    share = f"{row['right']} of {row['drafted']}" if row["drafted"] else ""
    counts = [row["tokens_per_forward"], row["rows_per_forward"], share]
    return [
        row["model"],
        f"{row['temperature']:g}",
        row["batch"],
        row["side"],
        *counts,
        row["wall_ratio"],
        row["cpu_ratio"],
    ]


if __name__ == "__main__":
    main(tyro.cli(Config))
