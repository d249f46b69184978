"""Compares texts in ragged batches with single texts: ``python benchmarks/text/ragged.py``.

Every prompt is decoded in a batch of 32 and by itself. The tokens must be the same, for every cache at its exact
setting, on two tiny random models (LLaDA-shaped and Dream-shaped) and on one of the zoo.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks.filing import file_result, markdown_table, result_path
from partsong import zoo
from partsong.samplers.text import TextAdapter, decode, load_text_model
from partsong.samplers.text.model import TextModel
from partsong.samplers.text.runner import StockTextModel

VOCAB, MASK = 97, 96
CACHES = (
    "none",
    "prefix:refresh_every=1",
    "dual:refresh_every=1",
    "delayed:refresh_every=1",
    "vicinity:refresh_every=1",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says how many texts to decode."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    prompts: int = 1000
    """Prompts per model and cache."""
    batch: int = 32
    """Texts at once."""
    temperature: float = 0.8
    """Temperature of the draws; at 0 most errors of the noise would not show."""


def _tiny(kind: type, config: type, adapter: TextAdapter) -> TextModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = kind(config(**sizes, num_key_value_heads=2, vocab_size=VOCAB, eos_token_id=7, initializer_range=0.25))
    return StockTextModel(model.eval(), adapter, mask_token_id=MASK, eos_token_ids=(7,))


def main(config: Config) -> None:
    """Decodes and writes the files."""
    torch.set_num_threads(1)
    draw = random.Random(0)
    tiny = [[draw.randrange(MASK) for _ in range(draw.randint(1, 40))] for _ in range(config.prompts)]
    llada = _tiny(LlamaForCausalLM, LlamaConfig, TextAdapter(name="llada", attention="full"))
    dream = _tiny(Qwen2ForCausalLM, Qwen2Config, TextAdapter(name="dream", attention="full", shifted=True))
    loaded = zoo.load("lists-mdlm")
    task = zoo.MODELS["lists-mdlm"].task
    own = [loaded.tokenizer(example.prompt).input_ids for example in task.examples(config.prompts, seed=3)]
    cases = [("LLaDA-shaped", llada, tiny), ("Dream-shaped", dream, tiny)]
    cases.append(("lists-mdlm", load_text_model(loaded.model), own))
    rows: list[dict[str, Any]] = []
    for name, model, prompts in cases:
        for cache in CACHES:
            rows.append(_case(config, name, model, prompts, cache))
            _file(config, rows)


def _file(config: Config, rows: list[dict[str, Any]]) -> None:
    columns = ("model", "cache", "texts", "texts that differ", "tokens", "forwards in batches")
    lines = [[row[key] for key in ("model", "cache", "prompts", "mismatches", "tokens", "forwards")] for row in rows]
    note = (
        f"Rule `entropy-bound`, temperature {config.temperature}, blocks of 4, up to 12 tokens, float32; prompts of 1 "
        f"to 40 tokens (of the zoo's model: its own), each decoded in a ragged batch of {config.batch} and alone."
    )
    title = f"Ragged batches, {sum(row['mismatches'] for row in rows)} texts differ"
    file_result(config.out, __file__, rows, title, note, markdown_table(columns, lines))


def _case(config: Config, name: str, model: TextModel, prompts: list[list[int]], cache: str) -> dict[str, Any]:
    options: dict[str, Any] = {"cache": cache, "max_new_tokens": 12, "block_size": 4, "temperature": config.temperature}
    mismatches = tokens = forwards = 0
    for first in range(0, len(prompts), config.batch):
        part = prompts[first : first + config.batch]
        seeds = list(range(first, first + len(part)))
        together = decode(model, part, seed=seeds, **options)
        forwards += together.steps
        for prompt, seed, text in zip(part, seeds, together.tokens, strict=True):
            mismatches += decode(model, [prompt], seed=[seed], **options).tokens != [text]
            tokens += len(text)
    row = {"model": name, "cache": cache, "prompts": len(prompts), "mismatches": mismatches}
    return {**row, "tokens": tokens, "forwards": forwards}


if __name__ == "__main__":
    main(tyro.cli(Config))
