"""Times text decoding against its peers and files the table: ``python benchmarks/text/text.py``.

One thread; the batch of 32 takes most of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.text.contests import ROWS_AT_ONCE, bench_text_model, run


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to time."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    repeats: int = 5
    """Rounds of the single text; the median counts."""
    repeats_batch: int = 1
    """Rounds of the batch."""
    batch: int = 32
    """Texts of the batch."""
    new_tokens: int = 256
    """Tokens of each text."""
    steps_per_block: int = 1
    """Forwards per block of 32 tokens, for all sides."""


def main(config: Config) -> None:
    """Times and writes the files."""
    torch.set_num_threads(1)
    model = bench_text_model()
    rows = []
    for batch, repeats in ((1, config.repeats), (config.batch, config.repeats_batch)):
        rows += run(
            repeats=repeats,
            batches=(batch,),
            new_tokens=config.new_tokens,
            steps_per_block=config.steps_per_block,
            model=model,
        )
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    note = (
        f"A random model of LLaDA's shape, {count:.0f} M parameters and 126464 tokens, float32, one thread, prompts of "
        f"64 tokens, all sides in turn in one process, medians. The plain loop runs the whole canvas, takes softmax in "
        f"float64 over all of it and makes as many steps; it does so {ROWS_AT_ONCE} rows at a time, as more would not "
        f"fit into memory. `generate` is transformers' own, with its cache. Tokens alike are equal to the first "
        f"side's."
    )
    columns = ("contest", "side", "texts", "forwards", "s", "tokens/s", "ratio", "largest tensor, MB", "tokens alike")
    lines = [
        (
            row["name"],
            row["side"],
            row["batch"],
            row["forwards"],
            f"{row['seconds_median']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio_to_serial']:.2f}x",
            f"{row['largest_tensor_mb']:.1f}" if row["largest_tensor_mb"] else "",
            f"{100 * row['same_tokens']:.1f} %",
        )
        for row in rows
    ]
    file_result(config.out, __file__, rows, "Text decoding", note, markdown_table(columns, lines))


if __name__ == "__main__":
    main(tyro.cli(Config))
