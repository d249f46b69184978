"""Builds a model without weights, and fills in this rank's share of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partsong.errors import ArgumentError
from partsong.parallel.loading.weight_files import WeightFiles
from partsong.parallel.ranks.pieces import WeightPiece

__all__ = ["can_fill", "empty_model", "fill_model", "local_shape", "placed_like"]


class Portions(Protocol):
    """Says which part of a weight this rank holds."""

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Returns the part; None for all of it."""
        ...


def empty_model(kind: Any, folder: Path) -> nn.Module:
    """Builds a model of diffusers whose weights have shapes only.

    Args:
        kind: its class.
        folder: the folder with its configuration.
    """
    from accelerate import init_empty_weights

    with init_empty_weights():
        return kind.from_config(kind.load_config(folder)).eval()


def can_fill(model: nn.Module, files: WeightFiles) -> bool:
    """Says whether the files use the model's own names for its weights: older files may use others."""
    return model.state_dict().keys() <= files.names.keys()


def fill_model(
    model: nn.Module, shards: Portions | None, files: WeightFiles, dtype: torch.dtype, device: torch.device
) -> None:
    """Reads a model's missing weights: this rank's share where they are shared out, else all.

    Args:
        model: some of its weights have a shape only.
        shards: the shares of its weights; None fills in whole weights.
        files: its weights.
        dtype: type of the weights, except in layers that the model's class keeps in single precision.
        device: where to put them.

    Raises:
        ArgumentError: the shape of a weight differs from the model's configuration.
    """
    single = set(getattr(type(model), "_keep_in_fp32_modules", None) or ())
    for path, part in model.named_modules():
        for name, lacking in _lacking(part):
            full = f"{path}.{name}" if path else name
            read = files.read(full, None if shards is None else shards.piece_of(part, name))
            if read.is_floating_point():
                read = read.to(torch.float32 if single & set(full.split(".")) else dtype)
            _put(part, name, lacking, read.to(device), full)


def _lacking(part: nn.Module) -> list[tuple[str, Tensor]]:
    """Lists a module's own weights without values, and buffers, which were created but not read."""
    weights = [(name, weight) for name, weight in part.named_parameters(recurse=False) if weight.is_meta]
    kept = part._non_persistent_buffers_set
    return weights + [(name, each) for name, each in part.named_buffers(recurse=False) if name not in kept]


def _put(part: nn.Module, name: str, before: Tensor, read: Tensor, full: str) -> None:
    wanted = local_shape(before)
    if read.shape != wanted:
        raise ArgumentError(
            f"weight {full} is {tuple(read.shape)} in the file, and {tuple(wanted)} by the model's configuration"
        )
    read = placed_like(before, read)
    if isinstance(before, nn.Parameter):
        setattr(part, name, nn.Parameter(read, requires_grad=before.requires_grad))
    else:
        part._buffers[name] = read


def local_shape(weight: Tensor) -> torch.Size:
    """Returns the shape of what this rank holds of a weight."""
    return weight.to_local().shape if isinstance(weight, DTensor) else weight.shape


def placed_like(before: Tensor, read: Tensor) -> Tensor:
    """Returns what was read as this rank's share, where a weight without values stands for one."""
    if not isinstance(before, DTensor):
        return read
    placed = (before.device_mesh, before.placements)
    return DTensor.from_local(read, *placed, run_check=False, shape=before.shape, stride=before.stride())
