"""Saves what experts have learned, and puts them in the place of a pipeline's transformer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from partsong.parallel import ExpertMixture
from partsong_zoo.shapes_experts.low_rank import LowRankChanges

__all__ = ["changed_transformer", "put_experts", "save_changes", "save_experts"]

SETTINGS = "experts.json"


def save_changes(changes: LowRankChanges, path: Path) -> None:
    """Saves changes in half precision."""
    state: dict[str, Tensor] = {name: tensor.half().contiguous() for name, tensor in changes.state_dict().items()}
    save_file(state, path)


def save_experts(
    experts: Sequence[LowRankChanges], router: Any, folder: Path, *, top_k: int | None, temperature: float
) -> None:
    """Saves a folder that `put_experts` reads: half precision safetensors.

    Args:
        experts: What each has learned beyond the transformer it began as.
        router: A transformer of diffusers; changed to half precision.
        folder: Where to.
        top_k: Experts asked for a sample; None asks all.
        temperature: What the router's logits are divided by.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, changes in enumerate(experts):
        save_changes(changes, folder / f"expert-{number}.safetensors")
    router.half().save_pretrained(folder / "router")
    path = folder / "router" / "config.json"
    settings = {k: v for k, v in json.loads(path.read_text()).items() if k != "_name_or_path"}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    knobs = {"experts": len(experts), "top_k": top_k, "temperature": temperature}
    (folder / SETTINGS).write_text(json.dumps(knobs, indent=2) + "\n")


def changed_transformer(base: Path, changes: Path) -> nn.Module:
    """Loads a transformer with changes merged into its weights, in single precision.

    Args:
        base: The folder of the pipeline it began in.
        changes: A file of `save_changes`.
    """
    transformer = _loaded(base / "transformer")
    LowRankChanges.read(load_file(changes)).merge(transformer)
    return transformer


def put_experts(pipeline: Any, base: Path, folder: Path) -> None:
    """Puts a mixture of experts in the place of a pipeline's transformer.

    An expert is loaded when it is first asked, so a rank holds those that it runs.

    Args:
        pipeline: The pipeline that the experts began in.
        base: Its folder.
        folder: One of `save_experts`.
    """
    knobs = json.loads((folder / SETTINGS).read_text())
    like: nn.Module = pipeline.transformer
    router = _loaded(folder / "router").to(pipeline.device)
    if pipeline.dtype != torch.float32:
        router = router.to(pipeline.dtype)
    files = [folder / f"expert-{number}.safetensors" for number in range(knobs["experts"])]
    pipeline.transformer = ExpertMixture(
        [_maker(base, file) for file in files],
        router,
        top_k=knobs["top_k"],
        temperature=knobs["temperature"],
        like=copy.deepcopy(like).to("meta"),
    )


def _maker(base: Path, changes: Path) -> Callable[[], nn.Module]:
    return lambda: changed_transformer(base, changes)


def _loaded(folder: Path) -> Any:
    """Loads a transformer in single precision."""
    return SD3Transformer2DModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
