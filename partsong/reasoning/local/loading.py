"""Loads what ``model=`` names: a folder, a model of the zoo, SmolLM2 from its package, or a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from partsong.accelerator import accelerator
from partsong.errors import ArgumentError, ArgumentTypeError, PartsongError
from partsong.model_folders import model_folder
from partsong.parallel.loading.text_share import TextShare, read_share
from partsong.reasoning.local import smollm2

__all__ = ["LoadedModel", "load", "load_tokenizer"]


class LoadedModel(NamedTuple):
    """Holds a model with its tokenizer.

    Attributes:
        name: what journals call it.
        module: the model, in eval mode.
        tokenizer: the model's own.
        owned: whether the module is not shared.
    """

    name: str
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    owned: bool


def load(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
    share: TextShare | None = None,
) -> LoadedModel:
    """Loads a model by its name, or takes one that is loaded already.

    Args:
        model: a transformers folder, a zoo name such as "lists-ar", "smollm2-135m", a hub id, or a module.
        tokenizer: needed with a module. Default: the folder's own.
        dtype: the type of the weights. Default: float32 on a CPU, the checkpoint's own on a GPU.
        device: where the model goes. Default: the GPU if there is one.
        share: says which part of the weights this rank needs; the others are not read where that can be avoided.

    Raises:
        ArgumentError: there is no such model, or the module has another dtype or device.
        ArgumentTypeError: the dtype is not floating, or the model is of another type.
        UnsupportedError: SmolLM2's package is not installed.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentTypeError(f"dtype={dtype}; weights need a floating one")
    if isinstance(model, PreTrainedModel):
        return _take(model, tokenizer, dtype, device)
    if not isinstance(model, str | Path):
        raise ArgumentTypeError(f"a model is a name, a folder or a transformers model, found {type(model).__name__}")
    where = torch.device(device if device is not None else accelerator())
    source = model_folder(model, others={smollm2.NAME: smollm2.folder})
    weights_dtype: Any = dtype if dtype is not None else "auto" if where.type != "cpu" else torch.float32
    options: dict[str, Any] = {"trust_remote_code": False}
    try:
        own = AutoTokenizer.from_pretrained(source, **options) if tokenizer is None else tokenizer
        module = None
        if share is not None and share.reads_shares:
            stated = None if weights_dtype == "auto" else weights_dtype
            module = read_share(Path(source), share, dtype=stated, device=where)
        if module is None:
            module = AutoModelForCausalLM.from_pretrained(source, dtype=weights_dtype, use_safetensors=True, **options)
    except PartsongError:  # it cannot be shared out
        raise
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(model, error) from error
    ready: Any = module.eval()
    return LoadedModel(str(model), ready.to(where), own, owned=True)


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model by the model's name.

    Raises:
        ArgumentError: there is no such model, or it has no tokenizer.
        UnsupportedError: SmolLM2's package is not installed.
    """
    try:
        source = model_folder(model, others={smollm2.NAME: smollm2.folder})
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except PartsongError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(model, error) from error


def _unreadable(model: str | Path, error: Exception) -> ArgumentError:
    return ArgumentError(
        f"model={str(model)!r} cannot be loaded: {error}. Give a transformers folder with safetensors weights and a "
        f"tokenizer, a zoo name, {smollm2.NAME!r}, or a hub id"
    )


def _take(
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
) -> LoadedModel:
    if tokenizer is None:
        raise ArgumentError("a model that is loaded already needs its tokenizer: give tokenizer=")
    if dtype is not None and module.dtype is not dtype:
        raise ArgumentError(f"dtype={dtype}, but the model is {module.dtype}: convert it first, or give its name")
    if device is not None and torch.device(device).type != module.device.type:
        raise ArgumentError(f"device={str(device)!r}, but the model is on {module.device}: move it first")
    name = module.config.name_or_path or type(module).__name__
    return LoadedModel(name, module, tokenizer, owned=False)
