"""Saves and loads the zoo's small models: stock folders, half precision on disk, single precision loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__all__ = ["load_folder", "save_folder", "save_pipeline"]


def save_folder(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Saves a stock folder, float16 safetensors that load as float32, and the tokenizer.

    Args:
        model: the model; changed to half precision.
        tokenizer: its tokenizer.
        folder: where to.
    """
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _settle(folder / "config.json", names_dtype=True)


def save_pipeline(pipeline: DiffusionPipeline, folder: Path) -> None:
    """Saves a stock pipeline folder, float16 safetensors that load as float32.

    Args:
        pipeline: the pipeline; changed to half precision.
        folder: where to.
    """
    pipeline.to(dtype=torch.float16).save_pretrained(folder)
    for path in (folder / "model_index.json", *folder.glob("*/config.json")):
        _settle(path, names_dtype=path.parent.name.startswith("text_encoder"))


def _settle(path: Path, *, names_dtype: bool) -> None:
    """Takes the machine's paths out of a configuration, and lets transformers load the type that diffusers loads."""
    settings = {key: value for key, value in json.loads(path.read_text()).items() if key != "_name_or_path"}
    if names_dtype:
        settings["dtype"] = "float32"
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def load_folder(folder: Path, dtype: torch.dtype | None = None) -> LlamaForCausalLM:
    """Loads the model of a folder, in evaluation mode on the CPU; float32 if `dtype` is None."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    return model.to(dtype=dtype or torch.float32).eval()
