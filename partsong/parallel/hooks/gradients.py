"""Refuses calls for gradients that a strategy does not pass on rightly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from partsong.errors import UnsupportedError

__all__ = ["check_gradients", "wanted_gradient"]


def wanted_gradient(modules: Sequence[nn.Module], given: Mapping[str, Any]) -> str | None:
    """Names what a call would compute a gradient of: an argument, or the weights; None where of nothing.

    Args:
        modules: those whose weights the call reads.
        given: the arguments by name.
    """
    if not torch.is_grad_enabled():
        return None
    for path, leaf in tree_flatten_with_path(dict(given))[0]:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return str(path[0].key)
    return "its weights" if any(w.requires_grad for module in modules for w in module.parameters()) else None


def check_gradients(name: str, modules: Sequence[nn.Module], given: Mapping[str, Any], by: str) -> None:
    """Refuses a call for gradients.

    Args:
        name: what is called, for messages.
        modules: those whose weights it reads.
        given: the arguments by name.
        by: names of the strategies that do not pass gradients on.

    Raises:
        UnsupportedError: gradients are on, and an argument or a weight requires one.
    """
    wanted = wanted_gradient(modules, given)
    if wanted is not None:
        raise UnsupportedError(
            f"{name} was called for a gradient of {wanted}, which is wrong or missing under {by}: "
            "wrap the call in torch.no_grad() or torch.inference_mode(), or, to compute gradients over ranks, use "
            "DataParallel or CfgParallel"
        )
