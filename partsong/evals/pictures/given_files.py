"""Reads what a user gives for scoring: weights of networks, without running code from the file, and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from partsong.errors import ArgumentError

__all__ = ["fitting", "read_pictures", "read_weights"]


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Reads tensors by name from a safetensors file, or from one that ``torch.save`` wrote.

    Raises:
        ArgumentError: the file is missing, or it holds anything but named tensors.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ArgumentError(f"no file {path}; give one with weights, .safetensors or .pth")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        values = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise ArgumentError(f"{path} cannot be read as weights: {type(error).__name__}: {first}") from error
    if not isinstance(values, Mapping) or not all(isinstance(value, Tensor) for value in values.values()):
        raise ArgumentError(f"{path} holds no tensors by name; save a state_dict")
    return dict(values)


def fitting(path: str | Path, weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Returns the tensors of a network in float32, out of a file that may hold others too.

    Args:
        path: of the file, for the error.
        weights: its tensors.
        shapes: those that the network needs, by name.

    Raises:
        ArgumentError: one is missing or has another shape.
    """
    for name, shape in shapes.items():
        if name not in weights or weights[name].shape != shape:
            held = list(weights[name].shape) if name in weights else "nothing"
            raise ArgumentError(f"{path} should hold {name} of shape {list(shape)}, found {held}")
    return {name: weights[name].float() for name in shapes}


def read_pictures(folder: str | Path) -> list[Path]:
    """Lists the pictures of a folder.

    Raises:
        ArgumentError: there is no such folder, or it has fewer than two pictures.
    """
    path = Path(folder).expanduser()
    files = sorted(path.rglob("*")) if path.is_dir() else []
    pictures = [file for file in files if file.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp")]
    if len(pictures) < 2:
        raise ArgumentError(f"--reference {folder}: {len(pictures)} pictures found; give a folder with at least two")
    return pictures
