"""Measures facts read, drift and bytes of the zoo's pictures with each wire, and predicts those of SDXL.

``python benchmarks/drift/wires.py`` samples fresh captions serially and with each strategy and wire on two ranks, and
predicts the bytes of a step of SDXL at 1024x1024 on eight ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from diffusers import UNet2DConditionModel

from benchmarks.drift.study import study
from benchmarks.filing import file_result, markdown_table, result_path
from partsong import DisplacedPatch, PartialPatch, Ring, Ulysses
from partsong.parallel import Strategy, predict
from partsong.parallel.exchange.wires import WIRES

#: A layer of 4096 image and 128 text tokens on two ranks, a block for each: 12 heads of 64.
BLOCK = (2112, 1, 2, 12, 64)
#: The strategies, after the serial twin, one launch for each group, so that rows are filed as they come.
GROUPS: dict[str, list[list[Strategy]]] = {
    "shapes": [
        [DisplacedPatch(wire="1bit"), DisplacedPatch(), Ulysses(wire="int8"), Ring(wire="1bit")],
        [
            DisplacedPatch(wire="2bit"),
            DisplacedPatch(wire="int8"),
            Ring(wire="int8"),
            DisplacedPatch(wire="1bit", warmup_steps=4),
        ],
    ],
    "shapes-unet": [[DisplacedPatch(wire="1bit"), DisplacedPatch(), PartialPatch(wire="1bit")]],
}
#: The strategies for which the bytes of SDXL are predicted.
PREDICTED: list[Strategy] = [
    DisplacedPatch(),
    DisplacedPatch(wire="int8"),
    DisplacedPatch(wire="1bit"),
    PartialPatch(),
    PartialPatch(wire="1bit"),
]
#: The UNet of SDXL base 1.0, from its published configuration.
SDXL: dict[str, Any] = {
    "sample_size": 128,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    model: list[str] = field(default_factory=lambda: list(GROUPS))
    """Models of the zoo."""
    nproc: int = 2
    """Ranks."""
    captions: int = 100
    """How many fresh captions."""
    seed: int = 0
    """Seed of captions and noise."""


def main(config: Config) -> None:
    """Runs the study and writes the files."""
    bytes_of_sdxl, spent, rows = predicted(), costs(), list[dict[str, Any]]()
    for model in config.model:
        for group in GROUPS[model]:
            cases = [(strategy,) for strategy in group]
            found = study(cases, nproc=config.nproc, model=model, num_captions=config.captions, seed=config.seed)
            rows += [{"model": model, **row} for row in found if row["case"] != "serial" or group is GROUPS[model][0]]
            write(config.out, rows, bytes_of_sdxl, spent)


def predicted() -> list[dict[str, Any]]:
    """Returns the bytes that the busiest of eight ranks sends in a step of SDXL, for each strategy."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(**SDXL).half()
    draws = {"sample": (1, 4, 128, 128), "encoder_hidden_states": (1, 77, 2048)}
    inputs: dict[str, Any] = {
        name: torch.zeros(shape, dtype=torch.float16, device="meta") for name, shape in draws.items()
    }
    added = {"text_embeds": (1, 1280), "time_ids": (1, 6)}
    inputs["added_cond_kwargs"] = {
        name: torch.zeros(shape, dtype=torch.float16, device="meta") for name, shape in added.items()
    }
    rows = []
    for strategy in PREDICTED:
        told = predict(unet, strategy, ranks=8, timestep=torch.tensor(1), **inputs)
        rows.append({"case": repr(strategy), "ranks": 8, "bytes_in_a_step": max(told.bytes_per_step)})
    return rows


def costs() -> list[dict[str, Any]]:
    """Returns the processor time, in milliseconds, of writing and reading a block by each wire: the least of 20."""
    torch.set_num_threads(1)
    values, rows = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)), []
    for name, wire in WIRES.items():
        message = wire.encode(values)
        spent = {
            "write": _milliseconds(partial(wire.encode, values, message)),
            "read": _milliseconds(partial(wire.decode, message, BLOCK)),
        }
        rows.append({"wire": name, "bytes": len(message), **spent})
    return rows


def _milliseconds(work: Callable[[], Any]) -> float:
    spent = []
    for _ in range(20):
        start = time.process_time()
        work()
        spent.append(1e3 * (time.process_time() - start))
    return min(spent)


def write(
    out: Path, rows: list[dict[str, Any]], bytes_of_sdxl: list[dict[str, Any]], spent: list[dict[str, Any]]
) -> None:
    """Writes both files."""
    note = (
        "The trained models at their default steps and guidance, float32; PSNR against the serial image, in dB; "
        "megabytes that the busiest rank sends per image, all steps together, warm-up included. Below, by `predict`, "
        "megabytes that the busiest of eight ranks sends in a step after the warm-up of SDXL, 1024x1024, half "
        "precision, one sample; with guidance it is twice that. Last, the processor time of one core for a block of "
        f"keys and values `{list(BLOCK)}` (tokens, samples, 2, heads, channels). No wall time is taken."
    )
    table = "\n\n".join((_pictures(rows), _sdxl(bytes_of_sdxl), _costs(spent)))
    title = "Keys and values in fewer bytes"
    file_result(out, __file__, [*rows, *bytes_of_sdxl, *spent], title, note, table)


def _pictures(rows: list[dict[str, Any]]) -> str:
    lines = [
        (
            row["model"],
            row["nproc"],
            row["case"],
            row["num_captions"],
            f"{100 * row['facts_read']:.2f} %",
            f"{row['psnr_median']:.1f}",
            f"{row['psnr_min']:.1f}",
            f"{row['bytes_sent'] / 1e6:.2f}",
        )
        for row in rows
    ]
    return markdown_table(
        ("model", "ranks", "case", "captions", "facts read", "PSNR median", "PSNR worst", "MB"), lines
    )


def _sdxl(rows: list[dict[str, Any]]) -> str:
    lines = [(row["case"], f"{row['bytes_in_a_step'] / 1e6:.1f}") for row in rows]
    return markdown_table(("SDXL on eight ranks", "MB in a step"), lines)


def _costs(rows: list[dict[str, Any]]) -> str:
    lines = [(row["wire"], f"{row['bytes'] / 1e3:.0f}", f"{row['write']:.1f}", f"{row['read']:.1f}") for row in rows]
    return markdown_table(("wire", "KB of a block", "ms to write", "ms to read"), lines)


if __name__ == "__main__":
    main(tyro.cli(Config))
