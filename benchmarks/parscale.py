"""What ParScale's streams cost: ``python benchmarks/parscale.py --out benchmarks/NAME``.

Measured: P = 1, 2, 4, 8 streams of one model beside wider models of the same predicted loss, all in turn in one
process. Computed: the same for a model of 1.6 billion parameters on a GPU, by the roofline.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from filing import file_result, markdown_table
from transformers import Qwen2Config

from partsong.evals.bench_parscale import run
from partsong.reasoning.local.parscale_cost import HARDWARE, LAWS, cost_table


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to time."""

    out: Path
    """Result files without suffix."""
    repeats: int = 5
    """Rounds; the median counts."""
    streams: tuple[int, ...] = (1, 2, 4, 8)
    """Values of P."""
    batches: tuple[int, ...] = (1, 4)
    """Texts at once."""
    prompt: int = 128
    """Tokens of each."""
    new_tokens: int = 16
    """Steps timed in each round."""
    law: str = "stack-v2-python"
    """Which parameters are as good as streams."""
    hardware: str = "h100-sxm"
    """Of the computed rows."""


def large_model() -> Qwen2Config:
    """The shape of Qwen2 with 1.3 billion parameters inside, 1.6 with its embedding."""
    return Qwen2Config(
        hidden_size=2048,
        num_hidden_layers=28,
        intermediate_size=6144,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    )


def main(config: Config) -> None:
    """Times, computes and writes the files."""
    torch.set_num_threads(1)
    rows = []
    for batch in config.batches:
        found = run(
            repeats=config.repeats,
            streams=config.streams,
            batch=batch,
            prompt=config.prompt,
            new_tokens=config.new_tokens,
            law=config.law,
        )
        rows += [{**row, "where": "measured here", "batch": batch, "prompt": config.prompt} for row in found]
    where = HARDWARE[config.hardware]
    for batch in (1, 64):
        # What the paper's cost analysis takes: as many tokens read as written.
        found = cost_table(
            large_model(), streams=config.streams, batch=batch, prompt=64, new_tokens=64, hardware=where,
            law=LAWS[config.law],
        )  # fmt: skip
        rows += [{**row, "where": f"computed, {config.hardware}", "batch": batch, "prompt": 64} for row in found]
    inside = rows[0]["parameters_inside"] / 1e6
    note = (
        f"Measured: a random Llama of {inside:.0f} M parameters inside (embeddings not counted), float32, one thread, "
        f"prompts of {config.prompt} tokens, then {config.new_tokens} steps; `parameters` is a wider model of one "
        f"stream whose predicted loss is that of P streams (law of {config.law}, extrapolated: it was fitted to models "
        f"of 0.5 to 4.4 billion). Computed: a Qwen2 shape of 1.6 billion parameters in 16 bit, roofline of "
        f"{config.hardware}. Memory is weights, keys and values; `+` is over one stream. Drift: largest difference of "
        "logits between steps with a cache and one forward without."
    )
    columns = ("where", "texts", "side", "P", "parameters", "memory, MB", "+", "prefill, ms", "step, ms", "+", "drift")
    table = markdown_table(columns, [_line(row) for row in rows])
    file_result(config.out, "benchmarks/parscale.py", rows, "What streams cost", note, table)


def _line(row: dict[str, Any]) -> list[object]:
    step = row["seconds_median"] if "seconds_median" in row else row["token_seconds"]
    return [
        row["where"],
        row["batch"],
        row["side"],
        row["size"],
        f"{row['parameters'] / 1e6:.1f} M",
        f"{row['memory_bytes'] / 1e6:.0f}",
        f"{row['memory_added']:+.1%}",
        f"{row['prefill_seconds'] * 1e3:.2f}",
        f"{step * 1e3:.2f}",
        f"{row['token_added']:+.1%}",
        f"{row['drift']:.1e}" if "drift" in row else "",
    ]


if __name__ == "__main__":
    main(tyro.cli(Config))
