"""Measures checked drafts on a model that is never wrong: ``python benchmarks/oracle/oracle_verified.py``.

Enough texts are drawn for the distance from the true distribution to be small where it is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.evals.oracle.model import OracleModel, Support
from partsong.evals.oracle.tasks import oracle_tasks
from partsong.samplers.text.decode import Decoded, decode
from partsong.samplers.text.tally import Tally


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says how many texts to decode, and how."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    rule: str = "quota:by=random"
    """The rule whose steps are drafted and checked."""
    verify: int = 8
    """Drafts of the texts whose distribution is measured."""
    counts: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Drafts of which tokens per forward are measured."""
    num: int = 1000
    """Texts for tokens per forward, each compared with its text without drafts."""
    draws: int = 400
    """Texts per valid text for the distribution."""
    largest: int = 1000
    """Most valid texts of a task whose distribution is measured."""
    chunk: int = 10_000
    """Texts decoded together."""


def drawn(support: Support, config: Config, verify: int, rows: range) -> Decoded:
    """Decodes the texts of some seeds."""
    return decode(
        OracleModel(support),
        [[]] * len(rows),
        rule=config.rule,
        max_new_tokens=support.length,
        block_size=support.length,
        temperature=1.0,
        seed=list(rows),
        verify=verify,
    )


def speeds(support: Support, config: Config) -> list[dict[str, Any]]:
    """Measures tokens per forward for each number of drafts, and how many texts are not those without drafts."""
    plain = drawn(support, config, 0, range(config.num))
    rows = []
    for verify in config.counts:
        checked = drawn(support, config, verify, range(config.num))
        whole = checked.summary()
        rows.append(
            {
                "task": support.name,
                "verify": verify,
                "num": config.num,
                "differing": sum(a != b for a, b in zip(plain.tokens, checked.tokens, strict=True)),
                "tokens_per_forward": whole["tokens_per_forward_all"],
                "rows_per_forward": whole["rows"] / sum(whole["forwards"].values()),
                "rejected": whole["tokens_rejected"] / max(whole["tokens_drafted"], 1),
            }
        )
    return rows


def distribution(support: Support, config: Config) -> dict[str, Any]:
    """Measures valid texts and total variation on many texts."""
    num, texts, whole = config.draws * len(support.texts), [], Tally()
    for low in range(0, num, config.chunk):
        decoded = drawn(support, config, config.verify, range(low, min(low + config.chunk, num)))
        texts += decoded.tokens
        whole.rows += sum(tally.rows for tally in decoded.tallies)
        whole.forwards["denoise"] += sum(tally.num_forwards for tally in decoded.tallies)
        print(f"{support.name}: {len(texts)} of {num}", flush=True)
    found = torch.tensor(texts)
    return {
        "task": support.name,
        "verify": config.verify,
        "num": num,
        "valid_texts": len(support.texts),
        "valid": float(support.contains(found).double().mean()),
        "total_variation": support.total_variation(found),
        "total_variation_by_chance": math.sqrt(len(support.texts) / (2 * math.pi * num)),
        "tokens_per_forward": found.numel() / whole.num_forwards,
        "rows_per_forward": whole.rows / whole.num_forwards,
    }


def main(config: Config) -> None:
    """Decodes and writes the files."""
    tasks = oracle_tasks()
    fast = [row for support in tasks.values() for row in speeds(support, config)]
    measured = {name: support for name, support in tasks.items() if len(support.texts) <= config.largest}
    true = [distribution(support, config) for support in measured.values()]
    cells = {(row["verify"], row["task"]): row for row in fast}
    lines = []
    for verify in config.counts:
        shown = [cells[verify, task] for task in tasks]
        mean = math.exp(sum(math.log(row["tokens_per_forward"]) for row in shown) / len(shown))
        rows = sum(row["rows_per_forward"] for row in shown) / len(shown)
        each = [f"{row['tokens_per_forward']:.2f} / {row['rows_per_forward']:.1f}" for row in shown]
        lines.append((verify, *each, f"{mean:.2f} / {rows:.1f}", sum(row["differing"] for row in shown)))
    keys = ("valid", "total_variation", "total_variation_by_chance", "tokens_per_forward", "rows_per_forward", "num")
    names = ("valid", "total variation", "by chance", "tokens per forward", "rows per forward", "texts")
    exact = [(name, *(f"{row[key]:.4g}" for row in true)) for name, key in zip(names, keys, strict=True)]
    note = (
        f"Exact conditionals of enumerated texts, temperature 1, rule `{config.rule}`, one token a step. First table: "
        f"tokens per forward, every forward counted, / rows per forward; {config.num} texts per cell; mean: the "
        f"geometric one of the first, the plain one of the second; differing: texts that are not those without drafts. "
        f"Second table, at {config.verify} drafts: the distribution of {config.draws} texts for each valid one, and "
        f"the distance that a perfect sampler has by chance, for tasks of at most {config.largest} valid texts."
    )
    table = markdown_table(("drafts", *tasks, "mean", "differing"), lines)
    table += "\n\n" + markdown_table((f"{config.verify} drafts", *measured), exact)
    file_result(config.out, __file__, fast + true, "Checked drafts on an oracle", note, table)


if __name__ == "__main__":
    main(tyro.cli(Config))
