"""Saves and loads the zoo's small models: stock folders, half precision on disk, single precision loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from partsong.errors import ArgumentError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__all__ = ["begin_with", "load_folder", "pipeline_to_begin_with", "save_folder", "save_pipeline"]


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
    """Loads the model of a folder, in evaluation mode on the CPU; float32 if `dtype` is None.

    Raises:
        ArgumentError: the folder holds no model.
    """
    if not (folder / "config.json").is_file():
        raise ArgumentError(f"no model in {str(folder)!r}: it has no config.json; name a saved model's folder")
    model: Any = LlamaForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    return model.to(dtype=dtype or torch.float32).eval()


def pipeline_to_begin_with(folder: str, *parts: str) -> Any:
    """Loads a pipeline folder whose training goes on.

    Args:
        folder: a stock pipeline folder.
        parts: names of components that it must have.

    Raises:
        ArgumentError: there is no pipeline, or it lacks a part.
    """
    from diffusers import DiffusionPipeline

    index = Path(folder) / "model_index.json"
    if not index.is_file():
        raise ArgumentError(f"cannot begin with {folder!r}: it has no model_index.json; name a saved pipeline's folder")
    if lacking := [part for part in parts if part not in json.loads(index.read_text())]:
        raise ArgumentError(f"cannot begin with {folder!r}: the pipeline has no {lacking[0]}")
    return DiffusionPipeline.from_pretrained(folder)


def begin_with(folder: str, module: nn.Module, trained: nn.Module) -> None:
    """Gives a module the weights that a folder's module has.

    Args:
        folder: where `trained` came from, for the error.
        module: what gets the weights.
        trained: what has them.

    Raises:
        ArgumentError: the two differ in a weight's name or shape; nothing has changed then.

    >>> begin_with("runs/mine", nn.Linear(2, 2), nn.Linear(2, 3))
    Traceback (most recent call last):
    partsong.errors.ArgumentError: cannot begin with 'runs/mine': its weight is [3, 2], and this recipe's is [2, 2]; ...
    """
    wanted, offered = ({k: [*v.shape] for k, v in each.state_dict().items()} for each in (module, trained))
    for name in (*wanted, *offered):
        if wanted.get(name) != offered.get(name):
            has, wants = offered.get(name, "missing"), wanted.get(name, "missing")
            raise ArgumentError(
                f"cannot begin with {folder!r}: its {name} is {has}, and this recipe's is {wants}; "
                "give the recipe the sizes that the folder has"
            )
    module.load_state_dict(trained.state_dict())
