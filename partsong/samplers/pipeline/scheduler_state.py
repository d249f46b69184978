"""Reads and restores a scheduler's state between steps, as tensors and plain values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["restore", "state_of"]


def state_of(scheduler: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns all attributes that a step may change: tensors by path, and other values by path."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in vars(scheduler).items():
        _note(name, value, tensors, values)
    return tensors, values


def restore(scheduler: Any, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Restores what `state_of` returned, on a scheduler of the same kind with the same timesteps."""
    for name, value in vars(scheduler).items():
        if name in tensors:
            restored: Any = tensors[name].to(value.device if isinstance(value, Tensor) else "cpu")
        elif isinstance(value, list) and name not in values:
            paths = [f"{name}.{place}" for place in range(len(value))]
            restored = [tensors.get(path, values.get(path)) for path in paths]
        else:
            restored = values.get(name, value)
        vars(scheduler)[name] = restored


def _note(name: str, value: Any, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    if isinstance(value, Tensor):
        tensors[name] = value
    elif isinstance(value, list):
        for place, item in enumerate(value):
            _note(f"{name}.{place}", item, tensors, values)
    elif value is None or isinstance(value, (bool, int, float, str)):
        values[name] = value
