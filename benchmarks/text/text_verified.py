"""Measures checked drafts with the zoo's list model: ``python benchmarks/text/text_verified.py``."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import AutoTokenizer

from benchmarks.filing import file_result, markdown_table, result_path
from partsong import zoo
from partsong.samplers.text import decode, load_text_model
from partsong_zoo.lists.tasks import examples


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to decode."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    num: int = 64
    """Questions, of all tasks."""
    rules: tuple[str, ...] = ("quota", "quota:by=random", "entropy-bound")
    """Rules whose steps are drafted and checked."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Temperatures of the draws."""
    counts: tuple[int, ...] = (0, 4, 8, 16)
    """Drafts; 0 is decoding without."""
    batches: tuple[int, ...] = (1, 16)
    """Texts decoded together."""
    repeats: int = 5
    """Runs, one number of drafts after the other; the median counts."""
    dtype: str = "float64"
    """Type of weights and arithmetic."""


def decoded(model: Any, asked: list[list[int]], batch: int, **options: Any) -> dict[str, Any]:
    """Decodes all questions in batches, and sums up the cost."""
    start, tokens, tallies = time.perf_counter(), [], []
    for low in range(0, len(asked), batch):
        here = asked[low : low + batch]
        part = decode(model, here, max_new_tokens=24, seed=list(range(low, low + len(here))), **options)
        tokens += part.tokens
        tallies += part.tallies
    return {
        "texts": tokens,
        "seconds": time.perf_counter() - start,
        "tokens": sum(tally.num_tokens for tally in tallies),
        "forwards": sum(tally.num_forwards for tally in tallies),
        "rows": sum(tally.rows for tally in tallies),
        "tokens_drafted": sum(tally.drafted for tally in tallies),
        "tokens_rejected": sum(tally.rejected for tally in tallies),
    }


def main(config: Config) -> None:
    """Decodes and writes the files."""
    torch.set_num_threads(1)
    model = load_text_model("lists-mdlm", dtype=getattr(torch, config.dtype))
    tokenizer = AutoTokenizer.from_pretrained(zoo.MODELS["lists-mdlm"].folder)
    asked = [tokenizer.encode(example.prompt) for example in examples(config.num, seed=5)]
    cases = [(r, t, b) for r in config.rules for t in config.temperatures for b in config.batches]
    rows = []
    for rule, temperature, batch in cases:
        runs: dict[int, list[dict[str, Any]]] = {count: [] for count in config.counts}
        for _ in range(config.repeats):
            for count, done in runs.items():
                done.append(decoded(model, asked, batch, rule=rule, temperature=temperature, verify=count))
        plain = runs[config.counts[0]][0]["texts"]
        for count, done in runs.items():
            texts = done[0].pop("texts")
            seconds = statistics.median(run["seconds"] for run in done)
            case = {"rule": rule, "temperature": temperature, "batch": batch, "verify": count, "num": config.num}
            differing = sum(a != b for a, b in zip(plain, texts, strict=True))
            rows.append(case | done[0] | {"seconds": seconds, "differing": differing})
            print(rows[-1], flush=True)
    base = {(row["rule"], row["temperature"], row["batch"]): row for row in rows if row["verify"] == config.counts[0]}
    lines = [
        (
            *(f"`{row['rule']}`", row["temperature"], row["batch"], row["verify"]),
            f"{row['tokens'] / row['forwards']:.2f}",
            f"{base[row['rule'], row['temperature'], row['batch']]['forwards'] / row['forwards']:.2f}",
            f"{row['rows'] / row['forwards']:.1f}",
            f"{base[row['rule'], row['temperature'], row['batch']]['seconds'] / row['seconds']:.2f}",
            row["differing"],
        )
        for row in rows
    ]
    note = (
        f"The zoo's lists-mdlm in {config.dtype} on one thread, {config.num} questions of all tasks, 24 places for an "
        f"answer. Tokens count up to the end of an answer. Times fewer forwards, and times as fast, are against "
        f"{config.counts[0]} drafts; median of {config.repeats} interleaved runs. Differing: other texts."
    )
    columns = ("rule", "temperature", "batch", "drafts", "tokens per forward", "times fewer forwards")
    table = markdown_table((*columns, "rows per forward", "times as fast", "differing"), lines)
    file_result(config.out, __file__, rows, "Checked drafts with a trained model", note, table)


if __name__ == "__main__":
    main(tyro.cli(Config))
