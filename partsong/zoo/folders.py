"""Saves and loads the zoo's small language models: stock folders, half precision on disk, single precision loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["load_folder", "save_folder"]


def save_folder(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Saves a stock folder, float16 safetensors that load as float32, and the tokenizer.

    Args:
        model: the model; changed to half precision.
        tokenizer: its tokenizer.
        folder: where to.
    """
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Transformers loads the type that the configuration names.
    path = folder / "config.json"
    settings = {k: v for k, v in json.loads(path.read_text()).items() if k != "_name_or_path"}
    settings["dtype"] = "float32"
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def load_folder(folder: Path, dtype: torch.dtype | None = None) -> LlamaForCausalLM:
    """Loads the model of a folder, in evaluation mode on the CPU; float32 if `dtype` is None."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    return model.to(dtype=dtype or torch.float32).eval()
