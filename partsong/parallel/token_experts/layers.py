"""Finds the layers of a language model that hold experts."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from partsong.errors import UnsupportedError

__all__ = ["expert_layers"]

#: How transformers calls experts: states `[T, C]`, their experts `[T, k]`, and the weights of these `[T, k]`.
_CALL = ("hidden_states", "top_k_index", "top_k_weights")


def expert_layers(model: Any) -> dict[str, Any]:
    """Returns the modules that hold experts by name, each with stacked weights `[experts, outputs, inputs]`.

    Raises:
        UnsupportedError: there are none, or they are called in another way than transformers calls experts.
    """
    name = type(model).__name__
    layers = {
        path: part
        for path, part in model.base_model.named_modules()
        if any(weight.ndim == 3 for weight in part.parameters(recurse=False))
        and isinstance(getattr(part, "num_experts", None), int)
    }
    if not layers:
        raise UnsupportedError(f"TokenExperts on {name}: it has no layers of experts; use TensorParallel")
    for path, part in layers.items():
        if tuple(inspect.signature(part.forward).parameters) != _CALL or not _stacked(part):
            raise UnsupportedError(
                f"TokenExperts on {name}: {path} ({type(part).__name__}) is no layer of experts as transformers calls "
                "them; use TensorParallel"
            )
    return layers


def _stacked(part: nn.Module) -> bool:
    count: Any = getattr(part, "num_experts")  # noqa: B009
    return all(len(weight) == count for weight in part.parameters(recurse=False))
