"""Saves and loads heads that predict dependences, and finds the one that belongs to a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from partsong.errors import ArgumentError, UnsupportedError
from partsong.samplers.text.dependence.head import DependenceHead, DependenceSettings
from partsong.samplers.text.model import TextModel

__all__ = ["brings_head", "head_for", "load_dependence", "save_dependence"]

_SETTINGS, _WEIGHTS = "dependence.json", "dependence.safetensors"
#: The folder beside a model's weights that holds its head.
_BESIDE = "dependence"
_TRAIN = "zoo/recipes/train_dependence.py trains one"


def save_dependence(head: DependenceHead, folder: Path) -> None:
    """Saves a head as a folder of two files, in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _SETTINGS).write_text(json.dumps(asdict(head.settings), indent=2) + "\n")
    tensors = {name: each.detach().half().contiguous() for name, each in head.state_dict().items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


def load_dependence(folder: Path) -> DependenceHead:
    """Loads a head that `save_dependence` has saved, in float32 on the CPU.

    Raises:
        ArgumentError: there is none, or its files do not fit together.
    """
    for name in (_SETTINGS, _WEIGHTS):
        if not (folder / name).is_file():
            raise ArgumentError(
                f"{folder} holds no head that predicts dependences: it has no {name}; {_TRAIN}, and "
                f"variation-bound:head=FOLDER takes it"
            )
    try:
        settings = DependenceSettings(**json.loads((folder / _SETTINGS).read_text(encoding="utf-8")))
        head = DependenceHead(settings)
        head.load_state_dict(load_file(folder / _WEIGHTS))
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ArgumentError(f"{folder} holds no head that can be read: {reason}; {_TRAIN}") from error
    return head.eval().requires_grad_(False)


def brings_head(model: TextModel) -> bool:
    """Says whether a head lies beside the weights of a model."""
    source: str = getattr(model, "source", "")
    return bool(source) and (Path(source) / _BESIDE / _SETTINGS).is_file()


def head_for(model: TextModel, folder: str | Path | None) -> DependenceHead:
    """Loads the head of a model, on its device.

    Args:
        model: whose states it reads.
        folder: where it is; None looks in the folder "dependence" beside the model's weights.

    Raises:
        ArgumentError: there is no head, or it cannot be read.
        UnsupportedError: it was trained for a model of other sizes.
    """
    source: str = getattr(model, "source", "")
    if folder is None and not source:
        raise ArgumentError(
            f"VariationBound needs dependences, and this {type(model).__name__} comes from no folder that may hold a "
            f"head: give variation-bound:head=FOLDER, or probe="
        )
    head = load_dependence(Path(source) / _BESIDE if folder is None else Path(folder).expanduser())
    own = {"hidden_size": model.head.weight.shape[1], "vocab_size": model.vocab_size}
    for name, value in own.items():
        if (asked := getattr(head.settings, name)) != value:
            raise UnsupportedError(
                f"this head predicts dependences of a model whose {name} is {asked}; that of this model is {value}: "
                f"give the head of this model; {_TRAIN}"
            )
    return head.to(model.device)
