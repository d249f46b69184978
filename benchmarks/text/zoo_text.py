"""Measures rules on the zoo's masked language model: ``python benchmarks/text/zoo_text.py``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong import zoo
from partsong.samplers.text import decode, load_text_model
from partsong.samplers.text.model import TextModel

#: Pairs of a rule and a temperature.
CASES = (
    ("quota", 0.0),
    ("entropy-bound", 0.0),
    ("quota", 1.0),
    ("entropy-bound", 1.0),
    ("entropy-bound:gamma=0.5", 1.0),
    ("threshold", 1.0),
    ("llada", 1.0),
    ("quota:per_step=2", 1.0),
    ("quota:per_step=24", 1.0),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says how many texts to decode."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    prompts: int = 100
    """Prompts per task and rule."""
    seed: int = 12
    """Seed of prompts and draws."""


def main(config: Config) -> None:
    """Decodes and writes the files."""
    torch.set_num_threads(1)
    loaded, task = zoo.load("lists-mdlm"), zoo.MODELS["lists-mdlm"].task
    model, canvas = load_text_model(loaded.model), zoo.MODELS["lists-mdlm"].defaults["canvas"]
    rows: list[dict[str, Any]] = []
    for family in task.FAMILIES:
        examples = task.examples(config.prompts, seed=config.seed, families=[family])
        prompts = [loaded.tokenizer(example.prompt).input_ids for example in examples]
        for rule, temperature in CASES:
            row = _case(model, prompts, rule, temperature, canvas, config.seed)
            texts = [loaded.tokenizer.decode(text, skip_special_tokens=True) for text in row.pop("tokens")]
            right = [task.check(example.prompt, text) for example, text in zip(examples, texts, strict=True)]
            rows.append({"task": family, **row, "accuracy": sum(right) / len(right)})
    names = [f"`{rule}`, T = {temperature:g}" for rule, temperature in CASES]
    lines = []
    for family in task.FAMILIES:
        mine = [row for row in rows if row["task"] == family]
        lines.append((family, *(f"{100 * row['accuracy']:.0f} / {row['tokens_per_forward']:.1f}" for row in mine)))
    note = (
        f"`lists-mdlm`, {config.prompts} fresh prompts per cell, a canvas of {canvas} in one block, no cache: "
        "percentage of right answers / tokens per forward, the end of the text among them."
    )
    table = markdown_table(("task", *names), lines)
    file_result(config.out, __file__, rows, "Rules on lists-mdlm", note, table)


def _case(
    model: TextModel, prompts: list[list[int]], rule: str, temperature: float, canvas: int, seed: int
) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": canvas, "block_size": canvas, "temperature": temperature, "seed": seed}
    decoded = decode(model, prompts, rule=rule, **options)
    speed = decoded.summary()["tokens_per_forward_all"]
    return {"rule": rule, "temperature": temperature, "tokens": decoded.tokens, "tokens_per_forward": speed}


if __name__ == "__main__":
    main(tyro.cli(Config))
