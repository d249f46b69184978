"""Measures what ranks hold of a large model: ``python benchmarks/ranks/memory.py``.

A Flux-like model of about 1 GB is written to a folder; then ranks load it with each strategy in processes of their own,
and make two steps of a small picture. Resident memory counts from the moment before loading, after all imports.
"""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong import Mesh, load_pipeline, mesh_for
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.compare import gather
from partsong.parallel import Strategy
from partsong.parallel.ranks.launch import launch
from partsong.samplers.registry import parse_strategy

MIXES = (
    "ulysses",
    "tensor-parallel",
    "sharded-weights",
    "sharded-weights ulysses",
    "tensor-parallel:degree=2 ulysses:degree=2",
)
WIDTH, HEADS, TEXT_TOKENS = 768, 12, 64
LAYERS, SINGLE_LAYERS = 6, 18


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    nproc: int = 4
    """Ranks, one thread each."""
    mixes: tuple[str, ...] = MIXES
    """Strategies of each mix, as command lines name them, with spaces between."""


def main(config: Config) -> None:
    """Writes the model, loads it in every way and files the table."""
    with tempfile.TemporaryDirectory() as folder:
        weights, block = _write_model(Path(folder))
        rows = [_row(mix, weights, block, launch(_on_rank, config.nproc, Path(folder), mix)) for mix in config.mixes]
    note = (
        f"A Flux-like model of {weights / 1e6:.0f} MB (float32; the largest block has {block / 1e6:.0f} MB), "
        f"{config.nproc} ranks. *Held* is what a rank keeps of the weights between steps, the largest over ranks; "
        "*loading* and *sampling* are peaks of resident memory beyond what the process had before it loaded anything. "
        f"MALLOC_MMAP_THRESHOLD_={os.environ.get('MALLOC_MMAP_THRESHOLD_', 'not set')} (the allocator gives freed "
        "memory back at once where that is small)."
    )
    columns = ("mix", "held", "of the weights", "loading, peak", "of the weights", "sampling, peak", "of the weights")
    lines = [
        (
            each["mix"],
            *(
                cell
                for key in ("held", "loading", "sampling")
                for cell in (f"{each[key] / 1e6:.0f} MB", f"{each[key] / weights:.2f}")
            ),
        )
        for each in rows
    ]
    file_result(config.out, __file__, rows, "Memory of ranks", note, markdown_table(columns, lines))


def _write_model(folder: Path) -> tuple[int, int]:
    """Writes a pipeline of random weights; returns the bytes of its denoiser and of its largest block."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    absent: Any = None
    transformer: Any = FluxTransformer2DModel(
        in_channels=64,
        num_layers=LAYERS,
        num_single_layers=SINGLE_LAYERS,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(16, 24, 24),
    )
    coder: Any = AutoencoderKL  # its annotations name one level only
    vae = coder(block_out_channels=(8,) * 4, norm_num_groups=4, latent_channels=16)
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae, absent, absent, absent, absent, transformer)
    pipe.save_pretrained(folder)
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    return _bytes(transformer), max(map(_bytes, blocks))


def _bytes(module: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def _on_rank(folder: Path, mix: str) -> list[list[float]]:
    torch.set_num_threads(1)
    quiet_libraries()
    strategies: list[Strategy] = [parse_strategy(name) for name in mix.split()]
    with Mesh(**mesh_for(strategies, int(os.environ["WORLD_SIZE"]))) as mesh:
        import diffusers

        assert diffusers.FluxPipeline and diffusers.FluxTransformer2DModel  # imported before the count begins
        with Peak() as loading:
            plan = load_pipeline(folder, *strategies, mesh=mesh)
        held = sum(local_part(weight).nbytes for weight in plan.target.transformer.parameters())
        with Peak(loading.base) as sampling:
            draw = torch.Generator().manual_seed(1)
            embeds = {"prompt_embeds": (1, TEXT_TOKENS, WIDTH), "pooled_prompt_embeds": (1, WIDTH)}
            named = {name: torch.randn(size, generator=draw) for name, size in embeds.items()}
            plan.target.set_progress_bar_config(disable=True)
            plan.target(**named, height=128, width=128, num_inference_steps=2, output_type="latent", generator=draw)
        table = gather(mesh, [held, loading.peak, sampling.peak], "end of a mix")
        plan.abandon()  # the whole weights are no longer needed
        plan.undo()
        return table


def local_part(weight: Any) -> torch.Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight


class Peak:
    """Samples resident memory while it is open."""

    def __init__(self, base: int | None = None) -> None:
        self.base = _resident() if base is None else base
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, _resident() - self.base)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, _resident() - self.base)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _row(mix: str, weights: int, block: int, table: list[list[float]]) -> dict[str, Any]:
    held, loading, sampling = (int(max(each)) for each in zip(*table, strict=True))
    return {"mix": mix, "weights": weights, "block": block, "held": held, "loading": loading, "sampling": sampling}


if __name__ == "__main__":
    main(tyro.cli(Config))
