"""Measures what ranks hold of a language model: ``python -m benchmarks.ranks.text_memory``.

Checkpoints of random weights are written to a folder; then ranks load them in processes of their own and write a few
tokens. Resident memory counts from the moment before loading, after all imports. ``--size small`` shows in a minute or
two that all cases run, and files nothing.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.ranks.memory import Peak, local_part
from partsong import Mesh, mesh_for, parse_strategy
from partsong.jobs.compare import gather
from partsong.parallel.ranks.launch import launch
from partsong.samplers.text import decode, load_text_model
from partsong.samplers.text.runner import StockTextModel

#: Sizes: those of SmolLM2-135M, about 1 GB in float32, and about as much of which nearly all are experts.
MODELS: dict[str, dict[str, Any]] = {
    "as SmolLM2-135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "1 GB": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 4096,
    },
    "1 GB of experts": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 4096,
    },
}
PROMPT, NEW = 32, 4


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path | None = None
    """Result files without suffix; if not given, today's among the results, and none for small models."""
    size: Literal["real", "small"] = "real"
    """Small models have four narrow layers: what they hold is little beside what a process needs anyway."""
    models: tuple[Literal["as SmolLM2-135M", "1 GB", "1 GB of experts"], ...] = (
        "as SmolLM2-135M",
        "1 GB",
        "1 GB of experts",
    )
    """Which of them."""
    nproc: tuple[int, ...] = (2, 4)
    """Numbers of ranks, one thread each."""
    strategies: tuple[str, ...] = ("tensor-parallel", "layer-pipeline", "token-experts", "sharded-weights")
    """As command lines name them."""


def main(config: Config) -> None:
    """Writes the models, loads them in every way and files the table."""
    rows = []
    for name in config.models:
        sizes = MODELS[name] if config.size == "real" else _small(MODELS[name])
        with tempfile.TemporaryDirectory() as folder:
            weights, layer = _write_model(folder, sizes)
            for text in config.strategies:
                for nproc in config.nproc:
                    too_few = text == "tensor-parallel" and sizes["num_key_value_heads"] < nproc
                    if too_few or (text == "token-experts" and "num_local_experts" not in sizes):
                        continue  # is refused
                    table = launch(_on_rank, nproc, folder, text)
                    held, loading, decoding = (int(max(each)) for each in zip(*table, strict=True))
                    figures = {"held": held, "loading": loading, "decoding": decoding}
                    rows.append({"model": name, "strategy": text, "ranks": nproc, "weights": weights} | figures)
                    rows[-1]["layer"] = layer
    note = (
        "Llamas and a Mixtral of random weights in float32. *Held* is what a rank keeps of the weights, the largest "
        f"over ranks; *loading* and *decoding* ({NEW} tokens after {PROMPT}) are peaks of resident memory beyond what "
        "the process had before it loaded anything, as shares of the whole weights. Three heads of keys do not "
        "divide: of two "
        "ranks one has two. MALLOC_MMAP_THRESHOLD_="
        f"{os.environ.get('MALLOC_MMAP_THRESHOLD_', 'not set')} (the allocator gives freed memory back at once where "
        "that is small)."
    )
    columns = ("model", "strategy", "ranks", "weights", "held", "loading, peak", "decoding, peak")
    lines = [
        (
            row["model"],
            row["strategy"],
            row["ranks"],
            f"{row['weights'] / 1e6:.3g} MB, {row['layer'] / 1e6:.3g} a layer",
            *(f"{row[key] / row['weights']:.2f}" for key in ("held", "loading", "decoding")),
        )
        for row in rows
    ]
    with tempfile.TemporaryDirectory() as nowhere:
        usual = result_path(__file__) if config.size == "real" else Path(nowhere, "small")
        title, table = "Memory of a language model's ranks", markdown_table(columns, lines)
        file_result(config.out or usual, __file__, rows, title, note, table)


def _small(sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the sizes of a model with as many heads and experts, four layers, and hardly any weights."""
    few = {"hidden_size": 8 * sizes["num_attention_heads"], "intermediate_size": 64, "num_hidden_layers": 4}
    return {**sizes, **few, "vocab_size": 512}


def _write_model(folder: str, sizes: dict[str, Any]) -> tuple[int, int]:
    """Writes a checkpoint; returns the bytes of its weights and of a layer."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    model: Any
    if "num_local_experts" in sizes:
        model = MixtralForCausalLM(MixtralConfig(**sizes, **more))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, **more))
    model.save_pretrained(folder)
    whole, layer = (sum(weight.nbytes for weight in part.parameters()) for part in (model, model.model.layers[0]))
    return whole, layer


def _on_rank(folder: str, text: str) -> list[list[float]]:
    torch.set_num_threads(1)
    strategy = parse_strategy(text)
    with Mesh(**mesh_for((strategy,), int(os.environ["WORLD_SIZE"]))) as mesh:
        with Peak() as loading:
            model = load_text_model(folder, strategies=[strategy], mesh=mesh)
        assert isinstance(model, StockTextModel) and model.plan is not None
        held = sum(local_part(weight).nbytes for weight in model.module.parameters())
        with Peak(loading.base) as decoding:
            decode(model, [[*range(PROMPT)]], max_new_tokens=NEW)
        table = gather(mesh, [held, loading.peak, decoding.peak], "end of a case")
        model.plan.abandon()  # the whole weights are no longer needed
        model.plan.undo()
        return table


if __name__ == "__main__":
    main(tyro.cli(Config))
